"""ShardTensor as a torch.Tensor: autograd's attributes, copies, files, refusals, lifetimes."""

import copy
import gc
import io
import logging
import pickle
import time
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import shardfield
from shardfield.comm.collectives import record_traffic
from shardfield.registry import name_of
from shardfield.testing import parity, rank_pool, refused

sf: Any = shardfield  # some results are typed torch.Tensor, whose ShardTensor attributes are read
SIZES = [4, 1]


def whole(*shape, seed=0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def shard(rank, x, dim=0, sizes=None, requires_grad=False) -> Any:
    mesh = rank.mesh(domain=rank.world_size)
    x = x.detach().to(rank.device).requires_grad_(requires_grad)
    return sf.distribute_tensor(x, mesh, [Shard(dim)], src_data_rank=None, sizes=sizes)


def full(x: Any) -> Any:
    return x.full_tensor()


def on_two_ranks(fn):
    """Runs the test's body on two ranks; it gets the rank."""

    def test():
        rank_pool(2).run(fn)

    test.__name__, test.__doc__ = fn.__name__, fn.__doc__
    return test


def raises(error, text):
    return pytest.raises(error, match=text)


@on_two_ranks
def test_is_a_tensor_of_the_global_shape(rank):
    x = shard(rank, whole(5, 3), sizes=SIZES)
    assert issubclass(type(x), torch.Tensor)
    assert isinstance(x, sf.ShardTensor)
    assert type(x).__name__ == "ShardTensor"
    assert x.shape == (5, 3) == x.size() == tuple(x.size(d) for d in (0, -1))
    assert x.ndim == x.dim() == x.ndimension() == 2
    assert x.numel() == x.nelement() == torch.numel(x) == 15
    assert x.nbytes == 15 * 8
    assert len(x) == 5
    assert x.to_local().shape == (SIZES[rank.rank], 3)
    assert x.placements == (Shard(0),)
    assert x.device_mesh is rank.mesh(domain=2)
    assert x.dtype == torch.float64
    assert x.device == rank.device
    assert x.is_leaf
    assert x.grad is None


@on_two_ranks
def test_iterating_takes_rows(rank):
    x = shard(rank, whole(5, 3), sizes=SIZES)
    rows = list(x.T)
    assert [row.shape for row in rows] == [(5,)] * 3
    assert torch.equal(rows[1].full_tensor(), whole(5, 3).T[1])
    assert all(torch.equal(row, other) for row, other in zip(x, whole(5, 3), strict=True))


@on_two_ranks
def test_repr_shows_global_shape_and_local_part(rank):
    x = shard(rank, torch.arange(10.0).view(5, 2), sizes=SIZES, requires_grad=True)
    text = repr(x)
    assert text.startswith(
        "ShardTensor((5, 2) split: dim 0 over domain as 4+1, dtype=torch.float32"
    )
    assert "requires_grad=True" in text
    assert f"local={x.to_local().detach()}" in text
    assert f"{x}" == str(x) == text
    assert f"{x.sum():.1f}" == "45.0"
    with pytest.raises(TypeError):
        f"{x:.1f}"


@on_two_ranks
def test_python_scalars_are_refused_until_reduced(rank):
    x = shard(rank, whole(5, 3), sizes=SIZES)
    for read in (float, int, bool, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy):
        with raises(sf.UnsupportedOperation, "docs/errors.md#scalars"):
            read(x)
    assert float(x.sum()) == pytest.approx(float(whole(5, 3).sum()))


@on_two_ranks
def test_case_21_copies_and_files_keep_values_sizes_and_flags(rank):
    def saved(x, **options):
        buffer = io.BytesIO()
        torch.save({"x": x}, buffer)
        buffer.seek(0)
        return torch.load(buffer, **options)["x"]

    copies = [
        lambda x: pickle.loads(pickle.dumps(x)),
        copy.copy,
        copy.deepcopy,
        saved,
        lambda x: saved(x, weights_only=False),
        lambda x: saved(x, mmap=False, map_location="cpu"),
    ]
    for requires_grad in (False, True):
        x = shard(rank, whole(5, 3), sizes=SIZES, requires_grad=requires_grad)
        for copied in copies:
            y = copied(x)
            assert type(y).__name__ == "ShardTensor"
            assert y.layout is x.layout
            assert y.is_leaf
            assert y.requires_grad is requires_grad
            assert torch.equal(y.full_tensor(), whole(5, 3))
            shared = y.to_local().data_ptr() == x.to_local().data_ptr()
            assert shared is (copied is copy.copy)


@on_two_ranks
def test_a_saved_view_does_not_drag_its_base_along(rank):
    x = shard(rank, torch.zeros(4, 10_000))
    assert len(pickle.dumps(x[:, :10])) < 4_000


@on_two_ranks
def test_deepcopy_copies_the_gradient_and_shares_within_one_copy(rank):
    x = shard(rank, whole(5, 3), sizes=SIZES, requires_grad=True)
    (x * x).sum().backward()
    first, second = copy.deepcopy([x, x])
    assert first is second
    assert torch.equal(first.grad.full_tensor(), 2 * whole(5, 3))
    assert first.grad.to_local().data_ptr() != x.grad.to_local().data_ptr()
    with pytest.raises(RuntimeError, match="leaves"):
        copy.deepcopy(x * 2)


@on_two_ranks
def test_casts_keep_the_layout(rank):
    x = shard(rank, whole(5, 3), sizes=SIZES)
    for cast, dtype in (
        (lambda x: x.float(), torch.float32),
        (lambda x: x.half(), torch.float16),
        (lambda x: x.to(torch.bfloat16), torch.bfloat16),
        (lambda x: x.to(x.float()), torch.float32),
        (lambda x: x.to(torch.ones(1, dtype=torch.int32)), torch.int32),
        (lambda x: x.type(torch.float32), torch.float32),
        (lambda x: x.float().type_as(x), torch.float64),
    ):
        y = cast(x)
        assert y.layout is x.layout
        assert y.dtype == dtype
    assert x.double() is x
    assert x.to(rank.device) is x


@on_two_ranks
def test_new_tensors_are_split_where_the_shape_is_the_same(rank):
    x = shard(rank, whole(5, 3), sizes=SIZES)
    for made in (x.new_zeros(x.shape), x.new_zeros(5, 3), x.new_full((5, 3), 0.0)):
        assert made.layout is x.layout
        assert not made.full_tensor().any()
    for made in (x.new_ones(3), x.new_ones((3,)), x.new_full((3,), 1.0), x.new_tensor([1.0] * 3)):
        assert type(made) is torch.Tensor
        assert made.tolist() == [1.0] * 3
        assert (x + made).layout is x.layout
    assert x.new_empty(2, dtype=torch.int32).dtype == torch.int32
    with raises(sf.LayoutError, "docs/errors.md#mixing"):
        x + x.new_ones(4, 3)


@on_two_ranks
def test_grad_is_sharded_and_can_be_set(rank):
    x = shard(rank, whole(5, 3), sizes=SIZES, requires_grad=True)
    for times in (1, 2):
        (x * x).sum().backward()
        assert isinstance(x.grad, sf.ShardTensor)
        assert x.grad.layout is x.layout
        assert torch.equal(x.grad.full_tensor(), times * 2 * whole(5, 3))
    x.grad = x.detach() * 3
    assert torch.equal(x.grad.full_tensor(), 3 * whole(5, 3))
    x.grad.zero_()
    assert not x.grad.full_tensor().any()
    with raises(sf.LayoutError, "a gradient has the layout of its tensor"):
        x.grad = torch.zeros(5, 3, dtype=torch.float64)
    with raises(sf.LayoutError, "a gradient has the layout of its tensor"):
        x.grad = x.detach().redistribute(sizes=[1, 4])
    x.grad = None
    assert x.grad is None


@on_two_ranks
def test_requires_grad_in_place_and_by_assignment(rank):
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            x = shard(rank, whole(5, 3), sizes=SIZES) * 1
            assert x.requires_grad_() is x
            assert x.requires_grad
        assert x.requires_grad
        assert x.is_leaf
        (x * x).sum().backward()
        assert torch.equal(x.grad.full_tensor(), 2 * whole(5, 3))
        x.requires_grad = False
        assert not x.requires_grad
    with pytest.raises(RuntimeError, match="floating point"):
        shard(rank, torch.arange(5)).requires_grad_()


@on_two_ranks
def test_hooks_and_retained_gradients_act_on_the_whole(rank):
    x = shard(rank, whole(5, 3), sizes=SIZES, requires_grad=True)
    seen = []
    y = x * 2
    y.retain_grad()
    handle = y.register_hook(lambda grad: seen.append(grad) or grad * 10)
    x.register_hook(lambda grad: seen.append(grad))
    x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf))
    (y * y).sum().backward()
    assert [type(g).__name__ for g in seen] == ["ShardTensor"] * 3
    assert seen[2] is x
    assert torch.equal(seen[0].full_tensor(), 4 * whole(5, 3))
    assert torch.equal(y.grad.full_tensor(), 40 * whole(5, 3))
    assert torch.equal(x.grad.full_tensor(), 80 * whole(5, 3))
    handle.remove()
    x.grad = None
    y = x * 2
    y.sum().backward()
    assert torch.equal(full(x.grad), torch.full((5, 3), 2.0, dtype=torch.float64))


@on_two_ranks
def test_backward_of_a_sharded_tensor_takes_its_gradient(rank):
    start = whole(5, 3, seed=1)
    for given in ("method", "function"):
        x = shard(rank, whole(5, 3), sizes=SIZES, requires_grad=True)
        other = shard(rank, whole(5, 3), sizes=SIZES, requires_grad=True)
        y, g = x * other, shard(rank, start, sizes=SIZES)
        if given == "method":
            y.backward(g, inputs=[x])
        else:
            torch.autograd.backward([y], [g], inputs=[x])
        assert torch.equal(x.grad.full_tensor(), start * whole(5, 3))
        assert other.grad is None
        with raises(sf.LayoutError, "reduce to a scalar"):
            (x * 2).backward()
        with raises(sf.LayoutError, "reduce to a scalar"):
            torch.autograd.backward(x * 2)
        with raises(sf.LayoutError, "same layout"):
            (x * 2).backward(g.redistribute(sizes=[1, 4]))
    # The gradient may be whole: every rank then takes its part.
    x.grad = None
    torch.autograd.backward([x * 2, (x * 3).sum()], [start, None])
    assert torch.allclose(full(x.grad), 2 * start + 3, atol=1e-14)


@on_two_ranks
def test_what_runs_inside_a_backward_of_sharded_tensors_acts_on_the_whole(rank):
    start, seen = whole(5, 3, seed=1), []

    def block(t):
        return t.softmax(0) * t.mean(0)  # saves as many tensors for the whole as for a part

    def run(x, g, differentiate):
        y = checkpoint(block, x * 2, use_reentrant=False)
        y.register_hook(lambda grad: seen.append(grad.mean()) or grad - grad.mean())
        return differentiate(x, y, g)

    def method(x, y, g):
        y.backward(g)
        return x.grad

    def function(x, y, g):
        torch.autograd.backward([y], [g], inputs=[x])
        return x.grad

    ways = (
        method,
        function,
        lambda x, y, g: torch.autograd.grad(y, x, g)[0],
        lambda x, y, g: torch.autograd.grad((y * y).sum(), {"x": x})["x"],
    )
    for differentiate in ways:
        expected = run(whole(5, 3).requires_grad_(), start, differentiate)
        x = shard(rank, whole(5, 3), sizes=SIZES, requires_grad=True)
        gradient = run(x, shard(rank, start, sizes=SIZES), differentiate)
        assert torch.allclose(full(gradient), expected, rtol=1e-12, atol=1e-12)
        assert torch.allclose(seen[-1], seen[-2], rtol=1e-12, atol=1e-12)


@on_two_ranks
def test_autograd_grad_of_inputs_and_parameters_to_any_order(rank):
    weight = nn.Parameter(whole(3, seed=1))
    plain = whole(5, 3).requires_grad_()
    x = shard(rank, whole(5, 3), sizes=SIZES, requires_grad=True)

    def penalty(x, w):
        y = (torch.tanh(x * w) ** 2).sum()
        gx, gw = torch.autograd.grad(y, [x, w], create_graph=True)
        norm = (gx**2).sum() + (gw**3).sum()
        second = torch.autograd.grad(norm, [x, w], create_graph=True)
        return gx, gw, norm, *second, torch.autograd.grad((second[0] ** 2).sum(), [w])[0]

    for mine, theirs in zip(penalty(x, weight), penalty(plain, weight), strict=True):
        assert isinstance(mine, sf.ShardTensor) is (theirs.shape == (5, 3))
        value = full(mine) if isinstance(mine, sf.ShardTensor) else mine
        assert torch.allclose(value, theirs, rtol=1e-10, atol=1e-10)
    loss = (x * weight).sum()
    assert (
        torch.autograd.grad(loss, [x, torch.ones(1, requires_grad=True)], allow_unused=True)[1]
        is None
    )


@on_two_ranks
def test_double_backward_accumulates(rank):
    x = shard(rank, whole(5, 3), sizes=SIZES, requires_grad=True)
    plain = whole(5, 3).requires_grad_()
    for leaf in (x, plain):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the cycle that create_graph makes
            (leaf**3).sum().backward(create_graph=True)
        first = leaf.grad
        leaf.grad = None
        (first**2).sum().backward()
    assert torch.allclose(x.grad.full_tensor(), plain.grad, rtol=1e-12)


@on_two_ranks
def test_detach_no_grad_and_inference_mode(rank):
    x = shard(rank, whole(5, 3), sizes=SIZES, requires_grad=True)
    y = x.detach()
    assert not y.requires_grad
    assert y.layout is x.layout
    assert y.to_local().data_ptr() == x.to_local().data_ptr()
    assert torch.equal(x.data.full_tensor(), whole(5, 3))
    with torch.no_grad():
        z = x * 2
        assert not z.requires_grad
        assert x.requires_grad
        assert z.grad_fn is None
        assert torch.equal((z + x).full_tensor(), 3 * whole(5, 3))
    # What no_grad made is an ordinary operand afterwards.
    (z * x).sum().backward()
    assert torch.equal(x.grad.full_tensor(), 2 * whole(5, 3))
    with torch.inference_mode():
        inference = F.conv1d(x[None].transpose(1, 2), torch.ones(1, 3, 3, dtype=x.dtype), padding=1)
        assert inference.is_inference()
        assert repr(inference).startswith("ShardTensor((1, 1, 5)")
        expected = F.conv1d(whole(5, 3).T[None], torch.ones(1, 3, 3, dtype=x.dtype), padding=1)
        assert torch.allclose(full(inference), expected, rtol=1e-12)
        expected = full(inference)
        assert torch.as_tensor(inference) is inference
        with pytest.raises(shardfield.UnsupportedOperation, match="_to_copy"):
            torch.as_tensor(inference, dtype=torch.float32)
    assert torch.equal(full(inference + 1), expected + 1)


@on_two_ranks
def test_an_optimizer_moves_a_sharded_tensor(rank):
    x = shard(rank, whole(5, 3), sizes=SIZES, requires_grad=True)
    plain = whole(5, 3).requires_grad_()
    for leaf in (x, plain):
        for make in (torch.optim.AdamW, torch.optim.SGD):
            optimizer = make([leaf], lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                (leaf**4).sum().backward()
                optimizer.step()
    assert torch.allclose(x.detach().full_tensor(), plain.detach(), rtol=1e-12)


@pytest.mark.parametrize("order", [1, 2, 3.5, float("inf")])
def test_clip_grad_norm_of_sharded_gradients(order):
    def body(rank):
        x = shard(rank, whole(5, 3), sizes=SIZES, requires_grad=True)
        w = whole(3, seed=1).requires_grad_()
        plain, v = whole(5, 3).requires_grad_(), whole(3, seed=1).requires_grad_()
        for pair in ((x, w), (plain, v)):
            ((pair[0] * pair[1]) ** 2).sum().backward()
        found = nn.utils.clip_grad_norm_([x, w], 1.0, order)
        expected = nn.utils.clip_grad_norm_([plain, v], 1.0, order)
        assert type(found) is torch.Tensor
        assert torch.allclose(found, expected, rtol=1e-12)
        assert torch.allclose(x.grad.full_tensor(), plain.grad, rtol=1e-12)
        assert torch.allclose(w.grad, v.grad, rtol=1e-12)
        nn.utils.clip_grad_value_([x], 0.01)
        nn.utils.clip_grad_value_([plain], 0.01)
        assert torch.allclose(x.grad.full_tensor(), plain.grad, rtol=1e-12)

    rank_pool(2).run(body)


@pytest.mark.parametrize("order", [0, 1, 2, 3.5, float("inf"), -float("inf")])
def test_vector_norm(order):
    x = whole(2, 5, 4)

    def norms(x):
        vector = torch.linalg.vector_norm
        return vector(x, order), vector(x, order, dim=1, keepdim=True), vector(x, order, (0, -1))

    parity(norms, [x], [1], double=order in (2, 3.5), ranks=(2, 3), subgroup=False)


def kin(x, weight):
    y = x * weight + x.new_ones(x.shape) + x.new_zeros(3)
    return torch.linalg.vector_norm(y, dim=0), y.norm(), y.sum(0) / torch.numel(y)


def methods_in_python(x, weight):
    first, second = (2 - x).split([1, 2], dim=1)
    y = (2 / (x * x + 1)).unflatten(1, (1, 3)) + 2 ** (x * weight).unsqueeze(1)
    return first, second, y, F.batch_norm(x, None, None, weight, training=True)


@pytest.mark.parametrize("fn", [kin, methods_in_python])
def test_methods_written_in_python_and_plain_operands_compile(fn):
    operands = [whole(5, 3), whole(3, seed=1)]
    one = {"ranks": (2,), "dtype": torch.float64, "sizes": [(4, 1)], "subgroup": False}
    parity(fn, operands, [0, None], compiled=True, **one)


def test_norm_of_a_large_or_zero_tensor_and_on_two_axes():
    x = torch.zeros(4, 6)
    x[1] = 1e15
    parity(torch.norm, [x], [{0: "h", 1: "w"}], dtype=torch.float32, ranks=(4,))
    parity(lambda x: x.norm(dim=0), [x], [0], dtype=torch.float64, ranks=(2,))
    parity(lambda x: x.norm(), [torch.zeros(4, 2)], [0], dtype=torch.float64, ranks=(2,))
    refused(lambda x: x.norm("nuc"), [x], [0], match="matrix norm")


@on_two_ranks
def test_in_place_operators_return_the_same_object(rank):
    x = shard(rank, whole(5, 3), sizes=SIZES)
    expected = whole(5, 3)
    for change in (
        lambda t: t.__iadd__(1),
        lambda t: t.__imul__(2),
        lambda t: t.__isub__(torch.ones(3, dtype=torch.float64)),
        lambda t: t.__itruediv__(3),
        lambda t: t.__ipow__(2),
        lambda t: t.relu_(),
        lambda t: t.clamp_(0.1, 2),
        lambda t: t.add_(t, alpha=2),
        lambda t: F.relu(t, inplace=True),
        lambda t: t.masked_fill_(t > 1, 0.5),
        lambda t: t.copy_(t * 2),
        lambda t: t.detach_(),
    ):
        assert change(x) is x
        expected = change(expected)
        assert torch.equal(x.full_tensor(), expected)
    assert x.zero_() is x
    assert x.fill_(2) is x
    assert x.full_tensor().unique().tolist() == [2]


@on_two_ranks
def test_in_place_writes_reach_the_base_and_the_graph(rank):
    x = shard(rank, whole(5, 4), sizes=SIZES, requires_grad=True)
    plain = whole(5, 4).requires_grad_()
    for leaf in (x, plain):
        y = leaf * 1
        y[:, 1:3].mul_(3)
        y.transpose(0, 1)[0].add_(leaf[:, 3])
        y += leaf
        (y * y).sum().backward()
    assert torch.allclose(x.grad.full_tensor(), plain.grad, rtol=1e-12)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x.add_(1)


@on_two_ranks
def test_writes_that_cannot_hold_are_refused(rank):
    x = shard(rank, whole(5, 3), sizes=SIZES)
    plain = torch.zeros(5, 3, dtype=torch.float64)
    moved = x.reshape(3, 5)
    refusals = [
        lambda: plain.add_(x),
        lambda: plain.copy_(x),
        lambda: plain.__iadd__(x),
        lambda: plain.mul_(x),
        lambda: plain.__setitem__((slice(None), slice(0, 2)), x[:, :2]),
        lambda: torch.add(x, x, out=plain),
        lambda: torch.add(x, x, out=x[:1]),
        lambda: torch.sum(x, 0, out=plain[0]),
        lambda: setattr(x, "data", plain),
        lambda: x[0, :2].add_(x),
    ]
    if moved._moved:
        refusals.append(lambda: moved.add_(1))
    for write in refusals:
        with pytest.raises((sf.UnsupportedOperation, sf.LayoutError)):
            write()
    assert not plain.any()
    assert torch.equal(x.full_tensor(), whole(5, 3))


@on_two_ranks
def test_nothing_outlives_its_last_reference(rank):
    def make(grad_mode, requires_grad):
        with torch.set_grad_enabled(grad_mode):
            x = shard(rank, whole(5, 3), sizes=SIZES, requires_grad=requires_grad)
            y = F.conv1d(x.T[None], torch.ones(2, 3, 3, dtype=x.dtype), padding=1)
            y.register_hook(lambda g: None) if y.requires_grad else None
            return x, y, y.sum(), x.view(5, 3), x.detach()

    gc.collect()
    gc.disable()
    try:
        for grad_mode in (True, False):
            for requires_grad in (True, False):
                made = make(grad_mode, requires_grad)
                if grad_mode and requires_grad:
                    made[2].backward()
                alive = [weakref.ref(t) for t in (*made, *map(sf.ShardTensor.to_local, made[:2]))]
                del made
                # The transport's thread lets go of what it reduced a moment after it is done.
                until = time.monotonic() + 5
                while any(ref() is not None for ref in alive) and time.monotonic() < until:
                    time.sleep(0.01)
                assert [ref() for ref in alive] == [None] * len(alive)
    finally:
        gc.enable()


@on_two_ranks
def test_a_training_loop_holds_constant_memory(rank):
    def tensors():
        gc.collect()
        return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]

    # Held, so that what earlier tests left behind neither dies nor lends its place to a new tensor.
    others = tensors()
    known = {id(other) for other in others}
    net = nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv1d(3, 1, 3)).double()
    x = shard(rank, whole(1, 2, 9), dim=2, sizes=[8, 1], requires_grad=True)
    counts = []
    for _ in range(4):
        net.zero_grad()
        x.grad = None
        net(x).square().mean().backward()
        counts.append(sum(id(o) not in known for o in tensors()))
    assert counts[0] > 0
    assert counts[1] == counts[2] == counts[3]


@on_two_ranks
def test_module_hooks_see_sharded_values_and_gradients(rank):
    net: Any = nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.ReLU()).double()
    x = shard(rank, whole(1, 2, 5), dim=2, sizes=SIZES, requires_grad=True)
    seen, wide = {}, whole(1, 3, 5, seed=2)

    def forward_pre(module, args):
        seen["pre"] = args[0]
        return (args[0] * 2,)

    def forward(module, args, output):
        seen["post"] = output
        return output + 1

    def backward_pre(module, grads):
        seen["backward pre"] = grads[0]
        return (grads[0] * wide,)

    def backward(module, inputs, outputs):
        seen["inputs"], seen["outputs"] = inputs[0], outputs[0]
        return (inputs[0] * 2,)

    net[0].register_forward_pre_hook(forward_pre)
    net[0].register_forward_hook(forward)
    net[0].register_full_backward_pre_hook(backward_pre)
    net[0].register_full_backward_hook(backward)
    y = net(x)
    y.sum().backward()
    conv, plain = copy.deepcopy(net[0]), whole(1, 2, 5).requires_grad_()
    for hooks in (conv._forward_hooks, conv._forward_pre_hooks, conv._backward_hooks):
        hooks.clear()
    conv._backward_pre_hooks.clear()
    conv.zero_grad()
    inner = conv(plain * 2)
    outputs = []
    inner.register_hook(lambda grad: outputs.append(grad * wide) or outputs[0])
    F.relu(inner + 1).sum().backward()
    assert torch.allclose(y.full_tensor(), F.relu(inner + 1), rtol=1e-12)
    assert torch.allclose(x.grad.full_tensor(), 2 * plain.grad, rtol=1e-12)
    assert torch.allclose(net[0].weight.grad, conv.weight.grad, rtol=1e-12)
    for name in ("pre", "post", "backward pre", "inputs", "outputs"):
        assert isinstance(seen[name], sf.ShardTensor), name
    assert torch.allclose(seen["inputs"].full_tensor(), plain.grad / 2, rtol=1e-12)
    assert torch.allclose(seen["outputs"].full_tensor(), outputs[0], rtol=1e-12)


@on_two_ranks
def test_a_parameter_may_be_a_shard_of_a_module(rank):
    module: Any = nn.Module()
    module.field = nn.Parameter(shard(rank, whole(5, 3), sizes=SIZES))
    assert [name for name, _ in module.named_parameters()] == ["field"]
    (module.field**2).sum().backward()
    assert torch.equal(full(module.field.grad), 2 * whole(5, 3))
    state = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        module.field.zero_()
    module.load_state_dict(state)
    assert torch.equal(full(module.field.detach()), whole(5, 3))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_case_foreign_autograd_functions_are_refused_with_the_recipe():
    text = refused(lambda x: Doubled.apply(x * 1).sum(), [whole(5, 3)], [0], match="Doubled.apply")
    assert "shardfield.register(Doubled)" in text
    assert "docs/errors.md#tripwire" in text
    refused(lambda x: Doubled.apply(x * 1) + 1, [whole(5, 3)], [0], match="Doubled.apply")
    refused(lambda x: F.relu(Doubled.apply(x)), [whole(5, 3)], [0], match="Doubled.apply")


@on_two_ranks
def test_a_foreign_function_result_can_be_shown_and_runs_without_gradient(rank):
    x = shard(rank, whole(5, 3), sizes=SIZES, requires_grad=True)
    y = Doubled.apply(x)
    assert "ShardTensor((5, 3)" in repr(y)
    assert y.requires_grad
    with torch.no_grad():
        assert torch.equal((Doubled.apply(x) + 1).full_tensor(), 2 * whole(5, 3) + 1)


def test_a_registered_autograd_function_is_exact():
    class Cubed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, power):
            ctx.save_for_backward(x)
            return x**power

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * 3 * x**2, None

    def body(rank):
        from shardfield.tensor import wrap

        @sf.register(Cubed)
        def cubed(op, x, power):
            return wrap(op(x.to_local(), power), x.layout)

        x = shard(rank, whole(5, 3), sizes=SIZES, requires_grad=True)
        y = Cubed.apply(x * 1, 3)
        (y * 2).sum().backward()
        assert torch.allclose(x.grad.full_tensor(), 6 * whole(5, 3) ** 2, rtol=1e-12)
        assert type(Cubed.apply(torch.ones(2), 3)) is torch.Tensor

    rank_pool(2).run(body)


@on_two_ranks
def test_the_tripwire_catches_what_no_handler_saw(rank):
    x = shard(rank, whole(5, 3), sizes=SIZES)
    with record_traffic() as traffic:
        for bypass in (
            lambda: torch._C._TensorBase.mul(x, x) if False else torch.ops.aten.set_(x, x),
            lambda: torch.vmap(lambda row: row * 2)(x),
            lambda: torch.func.grad(lambda t: (t * t).sum())(x),
            lambda: x.as_subclass(torch.Tensor),
            lambda: x.untyped_storage(),
            lambda: x.data_ptr(),
            lambda: torch.from_dlpack(x),
            lambda: x.share_memory_(),
        ):
            with pytest.raises(sf.UnsupportedOperation):
                bypass()
    assert not traffic.collectives


def unknown(x):
    return torch.linalg.svdvals(x)


def test_unknown_operations_are_refused_on_all_ranks_before_communication():
    text = refused(unknown, [whole(5, 3)], [0], match="linalg_svdvals")
    assert_four_lines(text)


def test_allow_gather_is_exact_and_says_what_it_costs():
    def gathered(x, weight):
        with sf.allow_gather():
            return torch.linalg.svdvals(x * weight) * weight[0]

    parity(
        gathered,
        [whole(5, 3), whole(3, seed=1)],
        [0, None],
        whole=True,
        ranks=(2, 3),
        output="plain",
    )

    def body(rank):
        class Lines(logging.Handler):
            def emit(self, record):
                lines.append(record.getMessage())

        lines, handler = [], Lines()
        logging.getLogger("shardfield").addHandler(handler)
        x = shard(rank, whole(5, 3), sizes=SIZES)
        with sf.allow_gather():
            unknown(x)
            (x * 2).sum()
            with pytest.raises(sf.UnsupportedOperation):
                x.resize_(3)
        logging.getLogger("shardfield").removeHandler(handler)
        with pytest.raises(sf.UnsupportedOperation):
            unknown(x)
        return lines

    expected = ["linalg_svdvals: gathered 120 bytes on every rank (allow_gather)"]
    assert rank_pool(2).run(body) == [expected] * 2


def assert_four_lines(text):
    asked, rule, fix, docs = text.splitlines()
    assert asked
    assert rule.startswith("  rule: ")
    assert fix.startswith("  fix: ")
    assert docs.startswith("  docs: docs/errors.md#")


def test_errors_have_four_lines_and_survive_pickling():
    error = sf.LayoutError("asked", "rule", "fix", "layout")
    assert_four_lines(str(error))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is sf.LayoutError
    assert str(again) == str(error)
    assert isinstance(error, sf.ShardfieldError)


def test_mixing_a_local_sized_plain_tensor_is_refused():
    def mixed(x):
        local = x.to_local() if isinstance(x, sf.ShardTensor) else x
        return x + torch.ones(3 + local.shape[0], 3, dtype=x.dtype)

    text = refused(
        lambda x: x + torch.ones(3, 3, dtype=x.dtype), [whole(5, 3)], [0], sf.LayoutError
    )
    assert_four_lines(text)
    assert "never this rank's part" in text


def test_register_refuses_duplicates():
    with pytest.raises(ValueError, match="conv2d has a handler already"):
        sf.register(F.conv2d)(lambda op, x: x)
    assert name_of(vars(torch._C.TensorBase)["T"].__get__) == "Tensor.T"


STEMS = {
    "nothing": lambda x: x * 1,
    "convolution": nn.Conv1d(3, 3, 3, padding=1),
    "norm": nn.GroupNorm(3, 3),
    "roll": lambda x: x.roll(1, 2),
    "padding": lambda x: F.pad(x, (1, 1), mode="circular"),
    "softmax": lambda x: x.softmax(2),
    "attention": lambda x: F.scaled_dot_product_attention(x.mT, x.mT, x.mT).mT,
    "moved": lambda x: x.transpose(1, 2).flatten(1),
}


@pytest.mark.parametrize("name", STEMS)
def test_reentrant_checkpoint_of_a_sharded_value(name: str):
    stem = STEMS[name]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = stem

        def forward(self, x):
            run = lambda y, factor: (y.sin() * y.mean(-1, keepdim=True) * factor, y, factor)  # noqa: E731
            first, second, _ = checkpoint(run, self.stem(x), 3.0, use_reentrant=True)
            return checkpoint(torch.tanh, first, use_reentrant=True) + second

    parity(Net(), [whole(2, 3, 5)], [2], ranks=(2,), dtype=torch.float64)


def test_replicated_placements_give_plain_tensors():
    def body(rank):
        mesh = rank.mesh(domain=2)
        x = sf.distribute_tensor(whole(5, 3), mesh, [Replicate()], src_data_rank=None)
        assert type(x) is torch.Tensor
        assert type(shard(rank, whole(5, 3)).sum()) is torch.Tensor

    rank_pool(2).run(body)
