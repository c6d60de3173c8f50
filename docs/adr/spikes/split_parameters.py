"""How should a parameter that is itself split be stored? Evidence for ADR 0002.

Run: ``python docs/adr/spikes/split_parameters.py`` (4 gloo CPU ranks: 2 data x domain, 2 tensor).
A fused QKV weight of 3 heads, split by heads over 2 tensor ranks (2 + 1), is stored in each
candidate way, wrapped by DDP or FSDP2 and taken through a training life; every figure is against
one process. FSDP2 wraps over 2 ranks, HSDP over 2 x 1 (replicated, as DDP is).
FSDP2 and DCP print the stacks of the failures that the table names: add ``2>/dev/null``.
"""

import copy
import dataclasses
import statistics
import tempfile
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

HEADS, HEAD_DIM, CHANNELS = 3, 4, 5
WIDTH = HEADS * HEAD_DIM
STOCK_TO_LOCAL = False


def owned_by(tensor: DeviceMesh, name: str, full: torch.Tensor, first_row: int = 0) -> "Owned":
    """What this tensor rank owns of a parameter: heads 0-1 on rank 0, head 2 on rank 1."""
    own = range(8) if tensor.get_local_rank() == 0 else range(8, 12)
    fused = tuple(range(own.start + k * WIDTH, own.stop + k * WIDTH) for k in range(3))
    dim, ranges = {"qkv": (0, fused), "proj": (1, (own,)), "scale": (0, (range(CHANNELS),))}[name]
    return Owned(dim, ranges, full.shape, tensor.get_group(), first_row)


def shard_of(full: torch.Tensor, owned: "Owned") -> torch.Tensor:
    parts = [full.narrow(owned.dim, r.start, len(r)) for r in owned.ranges]
    return torch.cat(parts, owned.dim).contiguous()


@dataclasses.dataclass(frozen=True)
class Owned:
    """A layout in miniature: the global ranges of `dim` that this rank's rows or columns are."""

    dim: int
    ranges: tuple[range, ...]
    full_shape: torch.Size
    group: dist.ProcessGroup
    first_row: int = 0

    def chunks(self, local_shape: torch.Size) -> list[tuple[int, ChunkStorageMetadata]]:
        """(local begin, chunk) per owned range; FSDP may have cut the rows, at `first_row`."""
        chunks, begin = [], 0
        for r in self.ranges:
            shift = self.first_row if self.dim == 0 else 0
            low = max(begin, shift)
            high = min(begin + len(r), shift + local_shape[self.dim])
            if low < high:
                offsets, sizes = [self.first_row, *[0] * (len(local_shape) - 1)], [*local_shape]
                offsets[self.dim], sizes[self.dim] = r.start + low - begin, high - low
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                chunks.append((low - shift, chunk))
            begin += len(r)
        return chunks


class Split(torch.Tensor):
    """Candidate B, and what DCP is given: the local shard retyped, with a global shape and norm."""

    owned: Owned

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        def plain(arg):
            if isinstance(arg, Split):
                return local_of(arg)
            return type(arg)(map(plain, arg)) if type(arg) in (list, tuple) else arg

        first = args[0] if isinstance(args[0], Split) else None
        if func in SHAPE:
            return func(torch.empty(first.owned.full_shape, device="meta"), *args[1:])
        if func in STATE:
            with torch._C.DisableTorchFunctionSubclass():
                out = func(*args)
            return split(out, first.owned) if func == GET_GRAD and out is not None else out
        out = func(*map(plain, args), **{k: plain(v) for k, v in (kwargs or {}).items()})
        if func is torch.linalg.vector_norm:
            total = out.square()
            dist.all_reduce(total, group=first.owned.group)
            return total.sqrt()
        if first is None or not isinstance(out, torch.Tensor):
            return out
        return first if func.__name__.endswith("_") else split(out, first.owned)

    def __deepcopy__(self, memo):
        out = split(local_of(self).detach().clone(), self.owned, self.requires_grad)
        out._is_param = getattr(self, "_is_param", False)
        return out

    def __create_write_items__(self, fqn, _):
        properties = TensorProperties.create_from_tensor(local_of(self))
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.owned.full_shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self):
        return [chunk for _, chunk in self.owned.chunks(local_of(self).shape)]

    def __get_tensor_shard__(self, index):
        local = local_of(self).detach()
        for begin, chunk in self.owned.chunks(local.shape):
            if chunk.offsets == index.offset:
                return local.narrow(self.owned.dim, begin, chunk.sizes[self.owned.dim])
        raise KeyError(index)


GET_GRAD = torch.Tensor.grad.__get__
STATE = {GET_GRAD, torch.Tensor.grad.__set__, torch.Tensor.is_leaf.__get__}
STATE |= {torch.Tensor.requires_grad.__get__, torch.Tensor.requires_grad.__set__}
STATE |= {torch.Tensor.requires_grad_, torch.Tensor.grad_fn.__get__}
SHAPE = {torch.Tensor.shape.__get__, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.stride}


def split(local: torch.Tensor, owned: Owned, requires_grad: bool = False) -> Split:
    out = torch.Tensor._make_subclass(Split, local, requires_grad)
    out.owned = owned
    return out


class Unwrap(torch.autograd.Function):
    """DTensor -> local. Unlike `to_local`, its backward does not assume even chunks."""

    @staticmethod
    def forward(ctx, x):
        ctx.like = x.device_mesh, x.placements, x.shape, x.stride()
        return x.to_local()

    @staticmethod
    def backward(ctx, grad):
        mesh, placements, shape, stride = ctx.like
        grad = grad.contiguous()
        return DTensor.from_local(
            grad, mesh, placements, run_check=False, shape=shape, stride=stride
        )


def local_of(x: torch.Tensor) -> torch.Tensor:
    """The plain local tensor of any storage, part of the autograd graph."""
    if isinstance(x, DTensor):
        return x.to_local() if STOCK_TO_LOCAL else Unwrap.apply(x)
    if isinstance(x, Split):
        with torch._C.DisableTorchFunctionSubclass():
            return x.as_subclass(torch.Tensor)
    return x


class Use(torch.autograd.Function):
    """Replicated -> used in a computation split over tensor: identity, gradient all-reduced."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
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


class Block(nn.Module):
    """Gated heads: column-split fused QKV, row-split projection, a scale replicated over tensor."""

    def __init__(self, parameters: dict[str, nn.Parameter], group=None):
        super().__init__()
        self.group = group
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * local_of(self.scale)
        x = x if self.group is None else Use.apply(x, self.group)
        q, k, v = (x @ local_of(self.qkv).T).unflatten(-1, (3, -1)).unbind(-2)
        out = (q * k.sigmoid() * v) @ local_of(self.proj).T
        return out if self.group is None else Reduce.apply(out, self.group)

    def __deepcopy__(self, memo):
        twins = {name: copy.deepcopy(p, memo) for name, p in self.named_parameters()}
        return Block(twins, self.group)


def full_parameters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"qkv": (3 * WIDTH, CHANNELS), "proj": (CHANNELS, WIDTH), "scale": (CHANNELS,)}
    return {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}


def stored(kind: str, name: str, full: torch.Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """One parameter in the candidate storage, on this rank."""
    tensor = mesh["tensor"]
    owned = owned_by(tensor, name, full)
    local = shard_of(full, owned)
    if kind == "A plain":
        out = nn.Parameter(local)
        out.owned = owned
        return out
    if kind == "B subclass":
        if name == "scale":
            return nn.Parameter(local)
        return nn.Parameter(split(local, owned))
    placements = [Replicate() if name == "scale" else Shard(owned.dim)]
    over = tensor
    if kind == "D root mesh":
        over, placements = mesh, [Replicate(), Replicate(), *placements]
    return nn.Parameter(
        DTensor.from_local(
            local, over, placements, run_check=False, shape=full.shape, stride=full.stride()
        )
    )


def build(kind: str, wrapper: str, mesh: DeviceMesh) -> nn.Module:
    parameters = {n: stored(kind, n, full, mesh) for n, full in full_parameters().items()}
    block = Block(parameters, mesh.get_group("tensor"))
    if wrapper == "DDP":
        return DistributedDataParallel(block, process_group=mesh.get_group("joint"))
    if kind == "D root mesh":
        hybrid = DataParallelMeshDims(shard="one", replicate="joint")
        dims = DataParallelMeshDims(shard="joint") if wrapper == "FSDP2" else hybrid
        fully_shard(block, mesh=mesh, dp_mesh_dims=dims)
    else:
        fully_shard(block, mesh=mesh["joint"] if wrapper == "FSDP2" else mesh["joint", "one"])
    block.set_force_sum_reduction_for_comms(True)
    return block


def inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def here(full: torch.Tensor, name: str, wrapper: str, mesh: DeviceMesh) -> torch.Tensor:
    """What this rank should hold of a full tensor."""
    local = shard_of(full, owned_by(mesh["tensor"], name, full))
    if wrapper != "FSDP2":
        return local
    parts, rank = torch.chunk(local, mesh["joint"].size()), mesh.get_local_rank("joint")
    return parts[rank] if rank < len(parts) else local[:0]


def first_row(local_rows: int, wrapper: str, mesh: DeviceMesh) -> int:
    if wrapper != "FSDP2":
        return 0
    return -(-local_rows // mesh["joint"].size()) * mesh.get_local_rank("joint")


def batch(step: int, part: int | None = None) -> torch.Tensor:
    x = torch.randn(4, CHANNELS, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x if part is None else x[2 * part : 2 * part + 2]


def backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def adamw(model: nn.Module, **how) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, **how)


def state_of(block: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters and AdamW's moments under one flat set of names."""
    state = dict(block.state_dict())
    for name, parameter in block.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"{name}.{moment}"] = optimizer.state[parameter][moment]
    return state


def gap(model: nn.Module, reference: nn.Module, wrapper: str, mesh: DeviceMesh, of) -> float:
    return max(
        (local_of(of(p)).detach() - here(of(q).detach(), n, wrapper, mesh)).abs().sum().item()
        for (n, p), q in zip(inner(model).named_parameters(), reference.parameters(), strict=True)
    )


def life(kind: str, wrapper: str, mesh: DeviceMesh) -> dict[str, object]:
    """Every stage on its own fresh model, so that one failure does not hide the next."""
    part = mesh.get_local_rank("joint")

    def reference():
        return Block({n: nn.Parameter(f.clone()) for n, f in full_parameters().items()})

    def gradient():
        model, ref = build(kind, wrapper, mesh), reference()
        backward(model, batch(0, part))
        backward(ref, batch(0))
        return gap(model, ref, wrapper, mesh, lambda p: p.grad)

    def accumulate():
        model, ref = build(kind, wrapper, mesh), reference()
        for step, last in ((0, False), (1, True)):
            with nullcontext() if wrapper != "DDP" or last else model.no_sync():
                if wrapper != "DDP":
                    model.set_requires_gradient_sync(last)
                backward(model, batch(step, part))
            backward(ref, batch(step))
        return gap(model, ref, wrapper, mesh, lambda p: p.grad)

    def clip():
        model, ref = build(kind, wrapper, mesh), reference()
        backward(model, batch(0, part))
        backward(ref, batch(0))
        got = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        want = nn.utils.clip_grad_norm_(ref.parameters(), 0.1)
        got = got.full_tensor() if isinstance(got, DTensor) else local_of(got)
        return max(
            abs(got - want).item() / want.item(),
            gap(model, ref, wrapper, mesh, lambda p: p.grad),
        )

    def optimizer(**how):
        model, ref = build(kind, wrapper, mesh), reference()
        ours, theirs, times = adamw(model, **how), adamw(ref), []
        for step in range(3):
            for m, o, x in ((model, ours, batch(step, part)), (ref, theirs, batch(step))):
                o.zero_grad()
                backward(m, x)
                o.step()
        error = gap(model, ref, wrapper, mesh, lambda p: p)
        for _ in range(60):
            begin = time.perf_counter()
            ours.step()
            times.append((time.perf_counter() - begin) * 1e6)
        return error, f"{statistics.median(times[10:]):.0f}us"

    def copied():
        parameter = stored(kind, "qkv", full_parameters()["qkv"], mesh)
        twin = copy.deepcopy(parameter)
        assert type(twin) is type(parameter) and isinstance(twin, nn.Parameter), type(twin)
        assert getattr(twin, "owned", None) == getattr(parameter, "owned", None), "layout lost"
        return (local_of(twin) - local_of(parameter)).abs().max().item()

    def stepped(model, ref):
        ours, theirs = adamw(model), adamw(ref)
        backward(model, batch(0, part))
        backward(ref, batch(0))
        ours.step()
        theirs.step()
        return ours, theirs

    def reload():
        model, ref = build(kind, wrapper, mesh), reference()
        ours, theirs = stepped(model, ref)
        twin = build(kind, wrapper, mesh)
        optimizer = adamw(twin)
        twin.load_state_dict(model.state_dict())
        optimizer.load_state_dict(ours.state_dict())
        for m, o, x in ((twin, optimizer, batch(1, part)), (ref, theirs, batch(1))):
            o.zero_grad()
            backward(m, x)
            o.step()
        return gap(twin, ref, wrapper, mesh, lambda p: p)

    def relaid(state):
        """The state with each value as a Split that knows its ranges: what sf.save would do."""
        out = {}
        for key, value in state.items():
            name = key.split(".")[0]
            full = full_parameters()[name]
            rows = shard_of(full, owned_by(mesh["tensor"], name, full)).shape[0]
            owned = owned_by(mesh["tensor"], name, full, first_row(rows, wrapper, mesh))
            out[key] = split(local_of(value).detach(), owned)
        return out

    def checkpoint(by_layout: bool):
        model, ref = build(kind, wrapper, mesh), reference()
        ours, theirs = stepped(model, ref)
        saved = state_of(inner(model), ours)
        where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(where)
        dcp.save(relaid(saved) if by_layout else saved, checkpoint_id=where[0])
        wanted = {key: value.detach() for key, value in state_of(ref, theirs).items()}
        alone = {key: torch.zeros_like(value) for key, value in wanted.items()}
        dcp.load(alone, checkpoint_id=where[0], no_dist=True)
        error = max((alone[key] - wanted[key]).abs().max().item() for key in wanted)
        if by_layout:
            other = range(4) if mesh.get_local_rank("tensor") == 0 else range(4, 12)
            owned = Owned(1, (other,), wanted["proj"].shape, mesh.get_group("tensor"))
            moved = {"proj": split(torch.zeros(CHANNELS, len(other), dtype=torch.float64), owned)}
            dcp.load(moved, checkpoint_id=where[0])
            gone = local_of(moved["proj"]) - shard_of(wanted["proj"], owned)
            error = max(error, gone.abs().max().item())
        return error

    stages = {
        "gradient": gradient,
        "accumulate": accumulate,
        "clip": clip,
        "AdamW": optimizer,
        "foreach": lambda: optimizer(foreach=True),
        "fused": lambda: optimizer(fused=True),
        "deepcopy": copied,
        "reload": reload,
        "DCP as is": lambda: checkpoint(False),
        "DCP by layout": lambda: checkpoint(True),
    }
    return {stage: attempt(run) for stage, run in stages.items()}


def attempt(run) -> tuple[float | None, str]:
    """(largest error over ranks, note), or (None, the first error raised on any rank)."""
    note = ""
    try:
        result = run()
        error, note = result if isinstance(result, tuple) else (result, "")
        mine = (float(error), note)
    except (Exception, CheckpointException) as exception:
        text = " ".join(str(exception).split())
        text = text[-150:] if isinstance(exception, CheckpointException) else text[:150]
        mine = (None, f"{type(exception).__name__}: {text}")
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    failed = [m for m in everyone if m[0] is None]
    return failed[0] if failed else (max(m[0] for m in everyone), note)


def show(rows: dict[str, dict[str, tuple[float | None, str]]]) -> None:
    notes: list[str] = []
    stages = list(next(iter(rows.values())))
    print(f"{'storage + wrapper':22}" + "".join(f"{s:>14}" for s in stages))
    for name, row in rows.items():
        cells = []
        for error, note in row.values():
            if error is None:
                if note not in notes:
                    notes.append(note)
                cells.append(f"raises [{notes.index(note) + 1}]")
            else:
                verdict = "ok" if error < 1e-10 else f"WRONG {error:.0e}"
                cells.append(f"{verdict} {note}".strip())
        print(f"{name:22}" + "".join(f"{c:>14}" for c in cells))
    print("ok: within 1e-10 of one process (float64); us: median optimizer.step(), 3 parameters")
    for number, note in enumerate(notes, 1):
        print(f"[{number}] {note}")


def rank_main(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("joint", "one", "tensor"))
    rows = {
        f"{kind} + {wrapper}": life(kind, wrapper, mesh)
        for kind in ("A plain", "B subclass", "C DTensor", "D root mesh")
        for wrapper in ("DDP", "FSDP2", "HSDP")
    }
    qkv = full_parameters()["qkv"]
    even = distribute_tensor(qkv, mesh["tensor"], [Shard(0)])
    if rank == 0:
        show(rows)
        print(f"distribute_tensor gives {even.to_local().shape[0]} rows; by heads rank 0 owns 24.")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(4, f"{folder}/store"), nprocs=4)
