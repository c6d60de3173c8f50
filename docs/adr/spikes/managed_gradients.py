"""Checks the managed-parameter rule of ADR 0002: a plain average over data x domain can be exact.

Run: ``python docs/adr/spikes/managed_gradients.py`` (4 gloo CPU ranks: 2 data, 2 domain).
Tokens are split unevenly over the domain (5 + 2). DDP and FSDP2 average over the joint mesh; a use
of a managed leaf in a split computation multiplies its gradient by the domain size. Figures:
largest relative difference of any gradient from one process, over all ranks.
"""

import tempfile
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

CHANNELS, TOKENS, SIZES = 6, 7, (5, 2)
seen = {"managed": 0, "unmanaged": 0}


class ScaleGradient(torch.autograd.Function):
    """Use of a managed leaf: the average that follows divides by too much, by this factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class Use(torch.autograd.Function):
    """Replicated -> used in a split computation (unmanaged): identity, gradient all-reduced."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Reduce(torch.autograd.Function):
    """Partial sum -> replicated."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Domain:
    """Stands for what the handlers do; without a group it is one process."""

    def __init__(self, mesh: DeviceMesh | None, rule: bool = True):
        self.group = None if mesh is None else mesh.get_group("domain")
        self.factor = len(SIZES) if rule else 1

    def use(self, weight: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return weight
        if getattr(weight, "_managed", False):
            seen["managed"] += 1
            return ScaleGradient.apply(weight, self.factor)
        seen["unmanaged"] += 1
        return Use.apply(weight, self.group)

    def mean_tokens(self, x: torch.Tensor) -> torch.Tensor:
        total = x.sum(1)
        return (total if self.group is None else Reduce.apply(total, self.group)) / TOKENS


class Mixer(nn.Module):
    """Parameters met by split activations only; one of them through a derived tensor."""

    def __init__(self, domain: Domain):
        super().__init__()
        self.domain = domain
        self.split = nn.Parameter(torch.randn(CHANNELS, CHANNELS))
        self.derived = nn.Parameter(torch.randn(CHANNELS, CHANNELS))

    def forward(self, x):
        use = self.domain.use
        return (x @ use(self.split)).tanh() @ use(self.derived.tanh())


class Net(nn.Module):
    def __init__(self, domain: Domain, recompute: bool = False, unused: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.domain, self.recompute = domain, recompute
        self.mixer = Mixer(domain)
        self.both = nn.Parameter(torch.randn(CHANNELS, CHANNELS))
        self.replicated = nn.Parameter(torch.randn(CHANNELS, 1))
        if unused:
            self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x):
        x = checkpoint(self.mixer, x, use_reentrant=False) if self.recompute else self.mixer(x)
        x = (x @ self.domain.use(self.both)).tanh()
        pooled = self.domain.mean_tokens(x)
        return (pooled @ self.both).tanh() @ self.replicated


def wrap(net: Net, wrapper: str, mesh: DeviceMesh, policy: MixedPrecisionPolicy, unused: bool):
    if wrapper == "DDP":
        for parameter in net.parameters():
            parameter._managed = True
        return DistributedDataParallel(
            net, process_group=mesh.get_group("joint"), find_unused_parameters=unused
        )
    for module in (net.mixer, net):
        fully_shard(module, mesh=mesh["joint"], mp_policy=policy)
        module.set_force_sum_reduction_for_comms(True)
        module.register_forward_pre_hook(flag_unsharded)
    return net


def flag_unsharded(module: nn.Module, args) -> None:
    for parameter in module.parameters(recurse=False):
        parameter._managed = True


def samples(step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, TOKENS, CHANNELS, generator=generator, dtype=dtype)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    out = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            out[name.removeprefix("module.")] = whole.double()
    return out


def compare(wrapper, mesh, *, recompute=False, steps=1, clip=None, unused=False, bf16=False,
            rule=True) -> str:  # fmt: skip
    dtype = torch.float32 if bf16 else torch.float64
    torch.set_default_dtype(dtype)
    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if bf16 else {}
    policy = MixedPrecisionPolicy(**half)
    seen.update(managed=0, unmanaged=0)
    net = Net(Domain(mesh, rule), recompute, unused)
    model = wrap(net, wrapper, mesh, policy, unused)
    reference = Net(Domain(None), unused=unused)
    data, domain = mesh.get_local_rank("data"), mesh.get_local_rank("domain")
    for step in range(steps):
        x = samples(step, dtype)
        mine = x[2 * data : 2 * data + 2].split(SIZES, 1)[domain]
        last = step == steps - 1
        if wrapper == "FSDP2":
            model.set_requires_gradient_sync(last)
        silent = model.no_sync() if wrapper == "DDP" and not last else nullcontext()
        with silent:
            model(mine).to(dtype).square().mean().div(steps).backward()
        reference(x).square().mean().div(steps).backward()
    norm_error = 0.0
    if clip is not None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        want = nn.utils.clip_grad_norm_(reference.parameters(), clip)
        norm_error = abs(norm - want).item() / want.item()
    got, want = gradients(model), gradients(reference)
    assert got.keys() == want.keys() or unused, (got.keys(), want.keys())
    errors = [((got[n] - want[n]).norm() / want[n].norm()).item() for n in want]
    worst = torch.tensor(max(*errors, norm_error))
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    uses = f"{seen['managed']}+{seen['unmanaged']}"
    return f"{worst.item():.1e} ({uses})"


CASES = {
    "split, replicated, both, derived": {},
    "the same without the factor": {"rule": False},
    "checkpoint (non-reentrant)": {"recompute": True},
    "accumulation over 3, no sync": {"steps": 3},
    "clip_grad_norm_": {"clip": 0.01},
    "an unused parameter": {"unused": True},
    "all of these": {"recompute": True, "steps": 3, "clip": 0.01, "unused": True},
}


def bf16_alone() -> float:
    """The same policy's error in one process, for scale."""
    torch.set_default_dtype(torch.float32)
    exact, half = Net(Domain(None)), Net(Domain(None)).bfloat16()
    x = samples(0, torch.float32)
    exact(x).square().mean().backward()
    half(x.bfloat16()).float().square().mean().backward()
    got, want = gradients(half), gradients(exact)
    return max(((got[n] - want[n]).norm() / want[n].norm()).item() for n in want)


def rank_main(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "domain"))
    mesh["data", "domain"]._flatten("joint")
    rows = {
        name: [compare(wrapper, mesh, **case) for wrapper in ("DDP", "FSDP2")]
        for name, case in CASES.items()
    }
    rows["bf16 MixedPrecisionPolicy"] = ["-", compare("FSDP2", mesh, bf16=True)]
    if rank == 0:
        print("largest relative gradient error (managed + unmanaged uses on rank 0)")
        print(f"{'':34}{'DDP':>18}{'FSDP2':>18}")
        for name, cells in rows.items():
            print(f"{name:34}" + "".join(f"{c:>18}" for c in cells))
        print(f"{'bf16 in one process, for scale':34}{'':18}{bf16_alone():>18.1e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(4, f"{folder}/store"), nprocs=4)
