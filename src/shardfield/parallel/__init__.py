"""Parallelism around a model: wrapping, compiling."""

from shardfield.parallel.compile import compile
from shardfield.parallel.parallelize import parallelize

__all__ = ["compile", "parallelize"]
