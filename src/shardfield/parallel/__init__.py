"""Parallelism around a model: wrapping, compiling."""

from shardfield.parallel.accumulate import no_sync
from shardfield.parallel.compile import compile
from shardfield.parallel.parallelize import parallelize

__all__ = ["compile", "no_sync", "parallelize"]
