"""Layers of models that torch does not have, for plain and sharded tensors."""

from shardfield.nn import functional, natten

natten.serve()

__all__ = ["functional"]
