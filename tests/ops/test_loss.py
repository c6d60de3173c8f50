"""Losses: CASES 12, 13 and 18; targets plain, sharded alike and sharded differently."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

import shardfield as sf
from shardfield.comm import record_traffic
from shardfield.testing import parity, rank_pool, refused

torch.manual_seed(0)
X, TARGET = torch.randn(2, 5, 9, 4), torch.randn(2, 5, 9, 4)
INDEX = torch.randint(0, 5, (2, 9, 4))
CLASS_WEIGHT = torch.rand(5)


def distances(x, target):
    """Elementwise losses in all reductions."""
    found = []
    for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss):
        found += [loss(x, target), loss(target, x, reduction="sum")]
    return found


@pytest.mark.parametrize("split", [0, 2])
@pytest.mark.parametrize("target", ["plain", "alike", "moved"])
def test_case_12_elementwise_losses(split, target):
    place = {"plain": None, "alike": split, "moved": 3}[target]
    ranks = (2, 3) if target == "plain" else (2,)
    parity(distances, [X, TARGET], [split, place], ranks=ranks, output="plain", double=True)


@pytest.mark.parametrize("target", [{2: "h"}, {3: "h", 2: "w"}, None])
def test_losses_on_a_two_dimensional_mesh(target):
    parity(
        F.mse_loss,
        [X, TARGET],
        [{2: "h", 3: "w"}, target],
        ranks=(4,),
        output="plain",
        dtype=torch.float64,
    )


def test_the_target_may_be_split_more_than_the_input():
    places = [{2: "h"}, {2: "h", 3: "w"}]
    parity(F.l1_loss, [X, TARGET], places, ranks=(4,), output="plain", dtype=torch.float64)


def classified(x, index):
    """Cross-entropy with weights, ignored targets and smoothing."""
    weight = CLASS_WEIGHT.to(x.dtype)
    return (
        F.cross_entropy(x, index),
        F.cross_entropy(x, index, weight, ignore_index=2, label_smoothing=0.1),
        F.cross_entropy(x, index, weight, reduction="sum"),
        F.nll_loss(x.log_softmax(1), index, weight, ignore_index=1),
    )


@pytest.mark.parametrize("split", [0, 2, 3])
def test_case_12_cross_entropy_of_indices(split):
    parity(classified, [X, INDEX], [split, None], ranks=(2, 3), output="plain", double=True)


def test_case_12_cross_entropy_with_a_sharded_target():
    parity(classified, [X, INDEX], [2, 1], ranks=(2, 3), output="plain")
    parity(classified, [X, INDEX], [None, 1], ranks=(2,), output="plain")
    parity(classified, [X, INDEX], [3, 1], ranks=(2,), output="plain")


def test_case_12_cross_entropy_of_probabilities():
    def loss(x, target):
        probability = target.softmax(1)
        return (
            F.cross_entropy(x, probability, CLASS_WEIGHT.to(x.dtype), label_smoothing=0.2),
            F.cross_entropy(x, probability, reduction="sum"),
        )

    parity(loss, [X, TARGET], [2, None], ranks=(2, 3), output="plain")
    parity(loss, [X, TARGET], [2, 2], ranks=(2,), output="plain")


def test_without_reduction_the_result_stays_sharded():
    def each(x, target, index):
        return (
            F.mse_loss(x, target, reduction="none"),
            F.cross_entropy(x, index, reduction="none"),
        )

    parity(each, [X, TARGET, INDEX], [2, None, None], ranks=(2, 3), output="sharded")


def test_binary_cross_entropy_and_divergence():
    def losses(x, target):
        wanted = target.sigmoid()
        weight = wanted[:1, :, :, :1].detach()
        return (
            F.binary_cross_entropy_with_logits(x, wanted, weight, pos_weight=weight[0] + 1),
            F.binary_cross_entropy(x.sigmoid(), wanted),
            F.kl_div(x, wanted, reduction="batchmean"),
        )

    parity(losses, [X, TARGET], [2, None], ranks=(2, 3), output="plain")


def test_case_18_a_weight_field_is_sliced():
    def loss(x, target, weight):
        return F.mse_loss(x, target, weight=weight), F.huber_loss(x, target, weight=weight)

    weight = torch.rand(X.shape)
    parity(loss, [X, TARGET, weight], [2, None, None], ranks=(2, 3), output="plain")
    parity(loss, [X, TARGET, weight], [2, 2, 2], ranks=(2,), output="plain")


def test_case_18_a_mask_with_nans_over_the_whole_domain():
    target = torch.where(TARGET > 1, torch.nan, TARGET)

    def loss(x, target):
        known = ~target.isnan()
        error = F.mse_loss(x, target.nan_to_num(), reduction="none") * known
        return error.sum() / known.sum()

    parity(loss, [X, target], [2, None], ranks=(2, 3), output="plain")


def test_case_13_a_loss_is_one_number_on_every_rank():
    whole = F.mse_loss(X, TARGET)

    def run(rank):
        mesh = rank.mesh(domain=3)["domain"]
        loss = F.mse_loss(sf.distribute_tensor(X, mesh, [Shard(2)], sizes=[7, 0, 2]), TARGET)
        assert type(loss) is torch.Tensor
        return loss.item(), float(loss), f"{loss:.6f}"

    for item, number, text in rank_pool(3).run(run):
        assert item == number == pytest.approx(whole.item(), rel=1e-6)
        assert text == f"{item:.6f}"


def test_one_all_reduce_forward_and_none_backward():
    def run(rank):
        x = sf.distribute_tensor(X, rank.mesh(domain=2)["domain"], [Shard(2)]).requires_grad_()
        with record_traffic() as traffic:
            (F.mse_loss(x, TARGET) + F.cross_entropy(x, INDEX)).backward()
        return traffic.operations

    for operations in rank_pool(2).run(run):
        assert operations == [("mse_loss", "all_reduce", 4), ("cross_entropy", "all_reduce", 8)]


def test_compiled():
    def some(x, target, index):
        return F.mse_loss(x, target), F.l1_loss(x, target), F.cross_entropy(x, index)

    inputs = [X, TARGET, INDEX]
    parity(some, inputs, [2, None, None], ranks=(2,), compiled=True, dtype=torch.float64)


def test_wrong_arguments():
    error = sf.LayoutError
    refused(F.mse_loss, [X, TARGET[:1]], [2, None], error=error, match="one global shape")
    refused(F.mse_loss, [X, TARGET[:, :, :5]], [2, None], error=error, match="never this rank's")
    refused(F.cross_entropy, [X, INDEX], [1, None], match="classes")
    refused(
        lambda x, y: F.l1_loss(x, y, weight=y), [X, TARGET], [2, None], match="l1_loss's weight"
    )


def test_refusals_reach_compiled_code_as_they_are():
    def compiled(x, target):
        weighted = sf.compile(lambda a, b: F.l1_loss(a, b, weight=b), backend="aot_eager")
        return weighted(x, target)

    refused(compiled, [X, TARGET], [2, None], ranks=(2,), match="l1_loss's weight")
