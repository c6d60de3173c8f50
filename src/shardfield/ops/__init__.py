"""One family of operations a file; importing this package registers them all."""

from shardfield.ops import conv, matmul, pointwise, pool, random, resize

__all__ = ["conv", "matmul", "pointwise", "pool", "random", "resize"]
