"""Norms: CASES 15 and 16, every kind of split, what is saved and what is sent."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, splits
from torch import nn
from torch.distributed.tensor import Shard

import shardfield as sf
from shardfield.comm import record_traffic
from shardfield.testing import parity, rank_pool, refused

torch.manual_seed(0)
X = torch.randn(3, 6, 9, 4) * 2 + 1


def affine(module: nn.Module) -> nn.Module:
    """The module with parameters that are not the neutral ones."""
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


class Several(nn.Module):
    """Modules that see the same input."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.all = nn.ModuleList(map(affine, modules))

    def forward(self, x):
        return tuple(module(x) for module in self.all)


@pytest.mark.parametrize("split", [2, 3, 0])
def test_case_15_group_and_instance_norm(split):
    # torch hands its kernel's unused bias on to the second derivative as "no gradient".
    net = Several(nn.GroupNorm(2, 6, bias=split != 0), nn.InstanceNorm2d(6))
    parity(net, [X], [split], ranks=(2, 3), output="sharded", double=True)


def test_case_15_group_norm_of_a_split_batch():
    parity(affine(nn.GroupNorm(2, 6)), [X], [0], ranks=(2, 3, 4), output="sharded")


def test_case_15_group_norm_on_a_two_dimensional_mesh():
    parity(affine(nn.GroupNorm(3, 6)), [X], [{2: "h", 3: "w"}], ranks=(4,), double=True)
    parity(affine(nn.GroupNorm(3, 6)), [X], [{0: "h", 3: "w"}], ranks=(4,))


def test_case_15_group_norm_keeps_its_digits_at_a_large_mean():
    x = torch.randn(1, 8, 40, 64) + 1000
    norm = nn.GroupNorm(4, 8)
    exact = copy.deepcopy(norm).double()(x.double())

    def run(rank):
        mesh = rank.mesh(domain=2)["domain"]
        return norm(sf.distribute_tensor(x, mesh, [Shard(2)], sizes=[39, 1])).full_tensor()

    for found in rank_pool(2).run(run):
        assert (found.double() - exact).norm() / exact.norm() < 1e-4


def test_group_norm_with_split_channels():
    parity(affine(nn.GroupNorm(3, 6)), [X], [1], ranks=(3,), sizes=[(2, 4, 0)])
    norm = affine(nn.GroupNorm(3, 6, bias=False))
    parity(norm, [X], [1], ranks=(3,), sizes=[(2, 4, 0)], double=True)
    parity(nn.InstanceNorm2d(6), [X], [1], ranks=(2,), sizes=[(1, 5)])


def test_groups_that_straddle_ranks():
    sizes = [(3, 3), (1, 5), (1, 4, 1), (0, 3, 3)]
    net = Several(nn.GroupNorm(3, 6, bias=False), nn.GroupNorm(2, 6, bias=False))
    parity(net, [X], [1], ranks=(2, 3), sizes=sizes, output="sharded", double=True)
    net = Several(nn.GroupNorm(1, 6), nn.GroupNorm(2, 6, affine=False))
    parity(net, [X], [{1: "h", 2: "w"}], ranks=(4,), dtype=torch.float64)
    norm = affine(nn.GroupNorm(2, 6))
    parity(norm, [X], [{0: "h", 1: "w"}], ranks=(4,), dtype=torch.float64)


def test_statistics_of_shared_groups_travel_once():
    def run(rank):
        mesh = rank.mesh(domain=2)["domain"]
        x = sf.distribute_tensor(X, mesh, [Shard(1)], sizes=[4, 2]).requires_grad_()
        with record_traffic() as traffic:
            y = F.group_norm(x, 2)
            y.backward(gradient=torch.ones_like(y))
        return [(kind, sent) for _, kind, sent in traffic.operations]

    for operations in rank_pool(2).run(run):
        assert operations == [("all_gather", 2 * 3 * 2 * 4), ("all_reduce", 2 * 3 * 2 * 4)]


def test_batch_and_instance_norm_with_split_channels():
    for training in (True, False):
        net = Several(
            nn.BatchNorm2d(6),
            nn.BatchNorm2d(6, track_running_stats=False),
            nn.InstanceNorm2d(6, track_running_stats=True, affine=True),
        ).train(training)
        parity(net, [X], [1], ranks=(3,), dtype=torch.float64, output="sharded", double=True)
    net = Several(nn.BatchNorm2d(6), nn.InstanceNorm2d(6, track_running_stats=True))
    for split in ({1: "h", 2: "w"}, {0: "h", 1: "w"}):
        parity(net, [X], [split], ranks=(4,), dtype=torch.float64)


def test_sync_batch_norm_is_batch_norm_of_the_whole_batch():
    plain = nn.Sequential(affine(nn.BatchNorm2d(6)), affine(nn.BatchNorm2d(6, momentum=None)))
    x = X.double()
    whole = copy.deepcopy(plain).double()
    want = whole(x)
    grads = torch.autograd.grad((want * want.cos()).sum(), [*whole.parameters()])

    def run(rank, axes, placement, sizes):
        mesh = rank.mesh(**axes)
        net = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain).double())
        rows, parts = x, axes.get("data", 1)
        if parts > 1:  # replicas of unequal batches
            rows = x[:1] if mesh.get_local_rank("data") == 0 else x[1:]
        shard = sf.distribute_tensor(rows, mesh["domain"], placement, None, sizes)
        y = net(shard)
        found = torch.autograd.grad((y * y.cos()).sum(), [*net.parameters()])
        evaluated = net.eval()(shard)
        buffers = dict(net.named_buffers())
        first = 0 if parts == 1 or mesh.get_local_rank("data") == 0 else 1
        return first, y.full_tensor(), found, buffers, evaluated.full_tensor()

    domain = rank_pool(2).run(run, {"domain": 2}, [Shard(2)], [7, 2])
    replicas = rank_pool(4).run(run, {"data": 2, "domain": 2}, [Shard(2)], [7, 2])
    calm = copy.deepcopy(whole).eval()(x)
    for found in (domain, replicas):
        for first, y, _, buffers, evaluated in found:
            torch.testing.assert_close(y, want[first : first + len(y)])
            torch.testing.assert_close(evaluated, calm[first : first + len(y)])
            torch.testing.assert_close(buffers, dict(whole.named_buffers()))
    for _, _, got, *_ in domain:
        torch.testing.assert_close(got, grads)
    # Each replica's gradients are of its own use of the weights: their sum is the whole's.
    for one, other, both in zip(replicas[0][2], replicas[2][2], grads, strict=True):
        torch.testing.assert_close(one + other, both)


@pytest.mark.parametrize("split", [1, 2])
def test_local_response_norm(split):
    net = Several(nn.LocalResponseNorm(3, 0.5), nn.LocalResponseNorm(4, 0.5, 1.5, 2.0))
    parity(net, [X], [split], ranks=(2, 3), output="sharded", double=True)
    x = torch.randn(2, 16, 12)
    parity(nn.LocalResponseNorm(5, 0.5), [x], [{1: "h", 2: "w"}], ranks=(4,), double=True)


def test_weight_and_spectral_norm_of_a_layer():
    """The derived weight is a plain tensor: its gradient is summed at its use."""

    def run(rank):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 4, 3, padding=1)),
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 3, padding=1)),
            nn.utils.parametrizations.orthogonal(nn.Conv2d(4, 4, 1)),
        ).double()
        mesh = rank.mesh(domain=2)["domain"]
        shard = sf.distribute_tensor(X.double(), mesh, [Shard(2)], sizes=[7, 2])
        found = []
        for x, layers in ((shard, copy.deepcopy(net)), (X.double(), net)):
            y = layers(x)
            grads = torch.autograd.grad((y * y.cos()).sum(), [*layers.parameters()])
            found.append((grads, [*layers.buffers()]))
        return found

    for mine, whole in rank_pool(2).run(run):
        torch.testing.assert_close(mine, whole)


@pytest.mark.parametrize("split", [0, 2])
def test_case_16_batch_norm_and_its_buffers(split):
    net = Several(nn.BatchNorm2d(6), nn.BatchNorm2d(6, momentum=None, affine=False))
    parity(net, [X], [split], ranks=(2, 3), output="sharded", double=True)


def test_case_16_running_variance_uses_the_global_count():
    norm = nn.BatchNorm1d(2, momentum=1.0)
    x = torch.randn(2, 2, 5, generator=torch.Generator().manual_seed(3))

    def run(rank):
        module = copy.deepcopy(norm)
        mesh = rank.mesh(domain=2)["domain"]
        module(sf.distribute_tensor(x, mesh, [Shard(2)], sizes=[4, 1]))
        return module.running_var, module.running_mean

    first, second = rank_pool(2).run(run)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    torch.testing.assert_close(first[0], x.transpose(0, 1).reshape(2, -1).var(1))


def test_batch_and_instance_norm_in_evaluation_and_with_buffers():
    net = Several(nn.BatchNorm2d(6).eval(), nn.InstanceNorm2d(6, track_running_stats=True))
    for split in (0, 2):
        parity(net, [X], [split], ranks=(2, 3), dtype=torch.float64)


def test_other_numbers_of_dims():
    parity(affine(nn.BatchNorm1d(6)), [X[..., 0]], [2], ranks=(2,))
    parity(affine(nn.GroupNorm(2, 6)), [X[..., None].contiguous()], [2], ranks=(2,))
    parity(nn.BatchNorm1d(6), [X[0].mT.contiguous().view(-1, 6)], [0], ranks=(2,))


@pytest.mark.parametrize("split", [0, 2, 3])
def test_layer_and_rms_norm(split):
    net = Several(
        nn.LayerNorm(4, bias=False),
        nn.LayerNorm((9, 4), bias=split != 0),
        nn.LayerNorm((6, 9, 4), elementwise_affine=False),
        nn.RMSNorm((9, 4)),
        nn.RMSNorm(4, eps=1e-3),
    )
    parity(net, [X], [split], ranks=(2, 3), output="sharded", double=True)
    parity(Several(nn.LayerNorm(4), nn.LayerNorm((9, 4))), [X], [split], ranks=(2,))


@examples(12)
@given(st.data())
def test_group_norm_on_any_split(data):
    dim = data.draw(st.sampled_from([1, 2]))
    extents = data.draw(splits((4, 7)[dim - 1], 3))
    groups = data.draw(st.sampled_from([1, 2, 4]))
    x = torch.randn(data.draw(st.integers(1, 2)), 4, 7, 3)
    parity(
        affine(nn.GroupNorm(groups, 4)), [x], [dim], ranks=(3,), sizes=[extents],
        dtype=torch.float64, subgroup=False,
    )  # fmt: skip


def test_compiled():
    net = Several(nn.GroupNorm(2, 6), nn.BatchNorm2d(6), nn.LayerNorm(4))
    parity(net, [X], [2], ranks=(2,), compiled=True, dtype=torch.float64)
    net = Several(nn.GroupNorm(2, 6), nn.SyncBatchNorm(6), nn.LocalResponseNorm(3))
    parity(net, [X], [1], ranks=(2,), sizes=[(4, 2)], compiled=True, dtype=torch.float64)


def test_one_collective_forward_and_one_backward():
    def run(rank):
        x = sf.distribute_tensor(X, rank.mesh(domain=2)["domain"], [Shard(2)]).requires_grad_()
        with record_traffic() as traffic:
            F.group_norm(x, 2).square().sum().backward()
            F.layer_norm(x, (4,)).sum().backward()
        return traffic.operations

    for operations in rank_pool(2).run(run):
        assert operations == [
            ("group_norm", "all_gather", 2 * 3 * 2 * 4),
            ("sum", "all_reduce", 4),
            ("backward of group_norm", "all_reduce", 2 * 3 * 2 * 4),
            ("sum", "all_reduce", 4),
        ]


def test_only_the_input_is_saved():
    def run(rank):
        x = torch.randn(1, 32, 64, 64)
        x = sf.distribute_tensor(x, rank.mesh(domain=2)["domain"], [Shard(2)]).requires_grad_()
        norm = nn.GroupNorm(8, 32)
        saved = []

        def pack(tensor):
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            norm(x)
        own = x.to_local().untyped_storage().data_ptr()
        kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
        return sum(size for place, size in kept.items() if place != own)

    assert max(rank_pool(2).run(run)) < 4096


def test_half_precision_has_fp32_statistics():
    x = torch.randn(2, 4, 32, 16).bfloat16() + 8
    norm = nn.GroupNorm(2, 4)
    exact = copy.deepcopy(norm).double()(x.double())

    def run(rank):
        mesh = rank.mesh(domain=2)["domain"]
        shard = sf.distribute_tensor(x, mesh, [Shard(2)]).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = norm(shard)
        y.float().square().sum().backward()
        return y.full_tensor().detach(), y.dtype, shard.grad.dtype

    for found, dtype, gradient in rank_pool(2).run(run):
        assert dtype == gradient == torch.bfloat16
        assert (found.double() - exact).abs().max() < 2 * exact.abs().max() * 2**-8


def test_wrong_arguments():
    refused(lambda x: F.group_norm(x, 4), [X], [2], error=sf.LayoutError, match="multiple")
    refused(lambda x: F.layer_norm(x, (2,)), [X], [3], error=sf.LayoutError, match="global shape")
    refused(nn.BatchNorm1d(6), [X[:1, :, 0, 0]], [0], error=ValueError, match="more than 1 value")
