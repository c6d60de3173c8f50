"""A parameter split over the domain, under FSDP2. Evidence for ADR 0002.

Run: ``python docs/adr/spikes/domain_split_parameter.py`` (4 gloo CPU ranks: 2 data, 2 domain). A
position embedding of 7 rows is split 5 + 2 over the domain and averaged over data only, beside a
replicated weight that is averaged over both. Compared with one process: gradients, global norm.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from split_parameters import Unwrap, attempt
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

SIZES, CHANNELS = (5, 2), 4


class Position(nn.Module):
    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x + Unwrap.apply(self.weight)


class Linear(nn.Module):
    """Replicated weight on split activations: its gradient times the domain size."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        weight = Unwrap.apply(self.weight)
        weight.register_hook(lambda grad: grad * len(SIZES))
        return x @ weight


def on_root_mesh(local: torch.Tensor, mesh: DeviceMesh, full: torch.Tensor, *to: Placement):
    """A DTensor whose local part may have any size: shape and stride are stated, not derived."""
    return nn.Parameter(
        DTensor.from_local(
            local.clone(), mesh, to, run_check=False, shape=full.shape, stride=full.stride()
        )
    )


def train_once(mesh: DeviceMesh, rest: DataParallelMeshDims) -> tuple[float, str]:
    generator = torch.Generator().manual_seed(0)
    x, position, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2, sum(SIZES), CHANNELS), (sum(SIZES), CHANNELS), (CHANNELS, CHANNELS))
    )
    data, domain = mesh.get_coordinate()
    own = position.split(SIZES)[domain]
    model = nn.Sequential(
        Position(on_root_mesh(own, mesh, position, Replicate(), Shard(0))),
        Linear(on_root_mesh(weight, mesh, weight, Replicate(), Replicate())),
    )
    fully_shard(model[0], mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="data"))
    fully_shard(model, mesh=mesh, dp_mesh_dims=rest)
    for module in (model[0], model):
        module.set_force_sum_reduction_for_comms(True)
    model(x[data : data + 1].split(SIZES, 1)[domain]).square().sum().backward()

    reference = nn.Parameter(position.clone()), nn.Parameter(weight.clone())
    ((x + reference[0]) @ reference[1]).square().sum().div(2).backward()
    want = reference[0].grad.split(SIZES)[domain].chunk(2)[data]
    position_error = (model[0].weight.grad.to_local() - want).norm() / want.norm()
    want = reference[1].grad
    weight_error = (model[1].weight.grad.full_tensor() - want).norm() / want.norm()
    want = nn.utils.clip_grad_norm_(reference, 0.1)
    norm_error = abs(nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor() / want - 1)
    errors = position_error.item(), weight_error.item(), norm_error.item()
    return max(errors), "relative error of position, weight, norm: {:.0e} {:.0e} {:.0e}".format(
        *errors
    )


def rank_main(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "domain"))
    hybrid = DataParallelMeshDims(shard="data", replicate="domain")
    joint = DataParallelMeshDims(shard=("data", "domain"))
    for name, rest in (("sharded over data", hybrid), ("sharded over both", joint)):
        _, note = attempt(lambda rest=rest: train_once(mesh, rest))
        if rank == 0:
            print(f"other parameters {name}: {note}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(4, f"{folder}/store"), nprocs=4)
