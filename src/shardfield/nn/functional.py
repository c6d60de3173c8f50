"""Functions of layers that torch does not have, for plain and sharded tensors."""

from shardfield.ops.neighborhood import neighborhood_attention

__all__ = ["neighborhood_attention"]
