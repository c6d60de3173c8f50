"""Domain parallelism for unmodified PyTorch models: one sample split over many devices."""

import torch

from shardfield import comm, nn, ops
from shardfield.distribute import distribute_tensor, from_local, local_slices
from shardfield.errors import LayoutError, RankFailure, ShardfieldError, UnsupportedOperation
from shardfield.factories import arange, full, linspace, ones, zeros
from shardfield.layout import Layout
from shardfield.mesh import init_mesh
from shardfield.ops.attention import attention_algorithm, plan_attention
from shardfield.ops.random import rand, randn
from shardfield.parallel import (
    Split,
    TensorPlan,
    compile,
    full_parameters,
    no_sync,
    parallelize,
    pipeline_stages,
    tensor_parallel,
)
from shardfield.registry import allow_gather, register
from shardfield.tensor import ShardTensor, serialized_globals

# What `torch.save` writes of a ShardTensor is data, so `torch.load` may read it with its default,
# weights_only=True.
torch.serialization.add_safe_globals(serialized_globals())

__all__ = [
    "Layout",
    "LayoutError",
    "RankFailure",
    "ShardTensor",
    "ShardfieldError",
    "Split",
    "TensorPlan",
    "UnsupportedOperation",
    "allow_gather",
    "arange",
    "attention_algorithm",
    "comm",
    "compile",
    "distribute_tensor",
    "from_local",
    "full",
    "full_parameters",
    "init_mesh",
    "linspace",
    "local_slices",
    "nn",
    "no_sync",
    "ones",
    "ops",
    "parallelize",
    "pipeline_stages",
    "plan_attention",
    "rand",
    "randn",
    "register",
    "tensor_parallel",
    "zeros",
]
