"""DDP's reduction with sequence parallelism: tensor ranks have had different tokens."""

import torch
import torch.distributed as dist

from shardfield.tensor import ShardTensor

# No annotations as strings here: DDP reads those of its hooks.


def mean_over_tensor_too(
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """DDP's reduction, after the average over tensor ranks of what is whole on each of them.

    Comm: one all-reduce per bucket over the tensor group, one over the joint group.
    """
    joint, tensor = groups
    pairs = zip(bucket.gradients(), bucket.parameters(), strict=True)
    whole = [gradient for gradient, p in pairs if not isinstance(p, ShardTensor)]
    if whole:
        flat = torch.cat([gradient.reshape(-1) for gradient in whole]).div_(tensor.size())
        dist.all_reduce(flat, group=tensor)
        for gradient, mean in zip(whole, flat.split([g.numel() for g in whole]), strict=True):
            gradient.copy_(mean.view_as(gradient))
    buffer = bucket.buffer().div_(joint.size())
    work = dist.all_reduce(buffer, group=joint, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


__all__ = ["mean_over_tensor_too"]
