"""One family of operations a file; importing this package registers them all."""

from shardfield.ops import conv, norm, pointwise, reduce

__all__ = ["conv", "norm", "pointwise", "reduce"]
