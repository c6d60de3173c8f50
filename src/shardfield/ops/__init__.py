"""One family of operations a file; importing this package registers them all."""

from shardfield.ops import conv, loss, norm, pointwise, reduce

__all__ = ["conv", "loss", "norm", "pointwise", "reduce"]
