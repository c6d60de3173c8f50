"""Train a small network on one image that is split over ranks.

python examples/first_steps.py                                # one rank
torchrun --nproc-per-node 3 examples/first_steps.py           # three: 86, 85 and 85 rows
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

import shardfield as sf

mesh = sf.init_mesh(seed=0)  # one axis, `domain`, over all ranks
model = nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.GELU(), nn.Conv2d(8, 1, 3, padding=1))
model = sf.parallelize(model.to(mesh.device_type), mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

# Rank 0 has the image, 256 rows; every other rank receives only the rows it will hold.
image, target = None, None
if dist.get_rank() == 0:
    image = torch.rand(1, 1, 256, 64, device=mesh.device_type)
    target = F.avg_pool2d(image, 3, stride=1, padding=1)
image = sf.distribute_tensor(image, mesh, [Shard(2)])
target = sf.distribute_tensor(target, mesh, [Shard(2)])

for step in range(20):
    loss = F.mse_loss(model(image), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.5f}")
dist.destroy_process_group()
