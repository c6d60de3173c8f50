"""What `nn.Module` asks of its parameters when it moves or converts them."""

from __future__ import annotations

import torch

from shardfield.registry import register
from shardfield.tensor import ShardTensor, local_of


@register(torch._has_compatible_shallow_copy_type, uses=False)
def compatible(op, input, from_) -> bool:
    """Whether `.data` of a parameter can be exchanged: for shards of one layout. Comm: none."""
    if not isinstance(input, ShardTensor) or not isinstance(from_, ShardTensor):
        return False
    return input.layout is from_.layout and op(local_of(input), local_of(from_))
