"""Parallelism around a model: wrapping, compiling, cutting into stages."""

from shardfield.parallel.compile import compile
from shardfield.parallel.parallelize import parallelize
from shardfield.parallel.pipeline import pipeline_stages

__all__ = ["compile", "parallelize", "pipeline_stages"]
