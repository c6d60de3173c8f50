"""Parallelism around a model: wrapping, splitting weights, cutting into stages, compiling."""

from shardfield.parallel.accumulate import no_sync
from shardfield.parallel.compile import compile
from shardfield.parallel.gathered import full_parameters
from shardfield.parallel.parallelize import parallelize
from shardfield.parallel.pipeline import pipeline_stages
from shardfield.parallel.tensor_parallel import tensor_parallel
from shardfield.parallel.tensor_plan import Split, TensorPlan

__all__ = [
    "Split",
    "TensorPlan",
    "compile",
    "full_parameters",
    "no_sync",
    "parallelize",
    "pipeline_stages",
    "tensor_parallel",
]
