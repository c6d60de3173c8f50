"""Losses: CASES 12, 13 and 18; targets plain, sharded alike and sharded differently."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, splits
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


ELEMENTWISE = {
    "soft_margin": lambda x, t, **r: F.soft_margin_loss(x, t.detach(), **r),
    "poisson": lambda x, t, **r: F.poisson_nll_loss(x, t.abs() + 2, full=True, **r),
    "gaussian": lambda x, t, **r: F.gaussian_nll_loss(x, t, x[..., :1].abs() + 0.1, full=True, **r),
    "hinge": lambda x, t, **r: F.hinge_embedding_loss(x, t.sign(), 2.0, **r),
    "kl": lambda x, t, reduction: F.kl_div(
        x, t, reduction=reduction.replace("mean", "batchmean"), log_target=True
    ),
    "ranking": lambda x, t, **r: F.margin_ranking_loss(x, x * t, t.sign(), 0.5, **r),
    "l1, weighted": lambda x, t, **r: F.l1_loss(x, t, weight=t * t, **r),
    "triplet": lambda x, t, **r: F.triplet_margin_loss(x, t, x * t, p=3, swap=True, **r),
    "triplet, own distance": lambda x, t, **r: F.triplet_margin_with_distance_loss(
        x, t, x * t, distance_function=lambda a, b: (a - b).abs().amax(-1), **r
    ),
    "labels": lambda x, t, **r: F.multilabel_soft_margin_loss(x, t.sigmoid(), t[0, 0], **r),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_losses_in_every_reduction_on_every_dim(name):
    loss = ELEMENTWISE[name]

    def reduced(x, target):
        return [loss(x, target, reduction=how) for how in ("none", "mean", "sum")]

    for split, place in ((0, None), (2, 2), (3, 1)):
        parity(reduced, [X, TARGET], [split, place], ranks=(3,), dtype=torch.float64)
    places = [{2: "h", 3: "w"}, {2: "h"}]
    parity(reduced, [X, TARGET], places, ranks=(4,), dtype=torch.float64, double=True)


ROWS, ROW_CLASS = torch.randn(6, 5), torch.randint(0, 5, (6,))
LABELS = torch.tensor([[3, 0, -1, 1, 2]]).repeat(6, 1).roll(1, 0)


def of_rows(x, index, labels):
    """Losses that read whole rows."""
    weight = CLASS_WEIGHT.to(x.dtype)
    return [
        loss(reduction=how)
        for how in ("none", "mean", "sum")
        for loss in (
            partial(F.multi_margin_loss, x, index, 2, 0.7, weight),
            partial(F.multilabel_margin_loss, x, labels),
            partial(
                F.cosine_embedding_loss, x, x.roll(1, 0).detach() + 1, 2 * (index % 2) - 1, 0.1
            ),
        )
    ]


@pytest.mark.parametrize(
    "places", [[0, None, None], [0, 0, 1], [1, None, 0], [None, 0, 0]], ids=str
)
def test_losses_of_whole_rows(places):
    parity(of_rows, [ROWS, ROW_CLASS, LABELS], places, ranks=(1, 2, 3), dtype=torch.float64)


def test_losses_of_one_row():
    def one(x, label, labels):
        return F.multi_margin_loss(x, label), F.multilabel_margin_loss(x, labels)

    row = [ROWS[0], ROW_CLASS[0], LABELS[0]]
    parity(one, row, [0, None, 0], ranks=(3,), output="plain", dtype=torch.float64, whole=True)


@pytest.mark.parametrize("places", [[1, None], [1, 0], [0, None], [2, 1], [None, 0]], ids=str)
def test_ctc_runs_on_whole_samples(places):
    spoken = torch.randn(8, 4, 5).log_softmax(2)
    said = torch.randint(1, 5, (4, 3))
    heard, length = torch.tensor([8, 6, 8, 7]), torch.tensor([3, 1, 2, 0])

    def ctc(x, said):
        found = [
            F.ctc_loss(x, said, heard, length, reduction=how, zero_infinity=True)
            for how in ("none", "mean", "sum")
        ]
        return [*found, F.ctc_loss(x, said, (8, 6, 8, 7), (3, 1, 2, 0))]

    parity(ctc, [spoken, said], places, ranks=(2, 3), dtype=torch.float64)


def test_ctc_of_joined_targets_and_of_one_sample():
    spoken = torch.randn(8, 4, 5).log_softmax(2)
    joined, lengths = torch.tensor([1, 2, 3, 4, 2, 2]), (3, 1, 2, 0)
    whole = (8, 8, 8, 8)
    parity(
        lambda x: F.ctc_loss(x, joined, whole, lengths),
        [spoken],
        [1],
        ranks=(3,),
        dtype=torch.float64,
    )
    parity(
        lambda x: F.ctc_loss(x, joined[:2], (8,), (2,)),
        [spoken[:, 0]],
        [0],
        ranks=(2,),
        dtype=torch.float64,
        whole=True,
    )


def of_classes(x, index, target):
    """Everything `cross_entropy` and `nll_loss` take."""
    weight = CLASS_WEIGHT.to(x.dtype)
    chance = target.softmax(2 if x is target else 1)
    return [
        loss(reduction=how)
        for how in ("none", "mean", "sum")
        for loss in (
            partial(F.cross_entropy, x, index),
            partial(F.cross_entropy, x * 100, index, weight, ignore_index=2, label_smoothing=0.1),
            partial(F.cross_entropy, x, chance),
            partial(F.cross_entropy, x, chance, weight, label_smoothing=0.2),
            partial(F.nll_loss, x, index, weight, ignore_index=1),
        )
    ]


@pytest.mark.parametrize("places", [[1, None, None], [1, 0, 3], [{1: "h", 2: "w"}, {2: "h"}, None]])
def test_split_classes(places):
    given = [X, INDEX, TARGET]
    # Composed of several operations on its classes, a rank does as much as torch's fused one.
    parity(of_classes, given, places, ranks=(4,), dtype=torch.float64, double=True, whole=True)


@examples(8)
@given(data=st.data())
def test_cross_entropy_of_any_arguments(data):
    split = data.draw(st.integers(0, 3))
    index = data.draw(st.booleans())
    options = {
        "reduction": data.draw(st.sampled_from(["none", "mean", "sum"])),
        "weight": data.draw(st.sampled_from([None, CLASS_WEIGHT.double()])),
        "label_smoothing": data.draw(st.sampled_from([0.0, 0.3])),
        "ignore_index": data.draw(st.sampled_from([-100, 0, 3] if index else [-100])),
    }
    if index:
        target, alike = INDEX, None if split == 1 else split - (split > 1)
    else:
        target, alike = TARGET.softmax(1), split
    place = data.draw(st.sampled_from([None, alike, 0]))
    sizes = [data.draw(splits(X.shape[split], 3))]
    parity(
        lambda x, y: F.cross_entropy(x, y, **options),
        [X, target],
        [split, place],
        ranks=(3,),
        sizes=sizes,
        dtype=torch.float64,
        whole=True,
    )


def test_split_classes_of_one_row_and_of_half_precision():
    def one(x, label):
        return F.cross_entropy(x, label), F.cross_entropy(x, label, reduction="none")

    given = [X[0, :, 0, 0], INDEX[0, 0, 0]]
    parity(one, given, [0, None], ranks=(3,), output="plain", dtype=torch.float64, whole=True)

    def run(rank):
        x = sf.distribute_tensor(X, rank.mesh(domain=2)["domain"], [Shard(1)])
        with torch.autocast("cpu", torch.bfloat16):
            wide = F.cross_entropy(x.bfloat16(), INDEX)
        return wide.dtype, F.cross_entropy(x.bfloat16(), INDEX)

    for wide, narrow in rank_pool(2).run(run):
        assert wide == torch.float32 and narrow.dtype == torch.bfloat16
        assert narrow.item() == pytest.approx(F.cross_entropy(X.bfloat16(), INDEX).item(), rel=0.02)


def test_one_all_reduce_forward_and_none_backward():
    def run(rank):
        x = sf.distribute_tensor(X, rank.mesh(domain=2)["domain"], [Shard(2)]).requires_grad_()
        with record_traffic() as traffic:
            (F.mse_loss(x, TARGET) + F.cross_entropy(x, INDEX)).backward()
        return traffic.operations

    for operations in rank_pool(2).run(run):
        assert operations == [("mse_loss", "all_reduce", 4), ("cross_entropy", "all_reduce", 8)]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_split_classes_send_largest_logits_and_sums_but_no_logits(smoothing):
    def run(rank):
        x = sf.distribute_tensor(X, rank.mesh(domain=2)["domain"], [Shard(1)]).requires_grad_()
        with record_traffic() as traffic:
            F.cross_entropy(x, INDEX, label_smoothing=smoothing).backward()
            F.nll_loss(x, INDEX).backward()
        return [(kind, sent) for _, kind, sent in traffic.operations]

    rows = INDEX.numel() * 4
    largest_and_sums, picked = [rows, 2 * rows], [rows]
    for operations in rank_pool(2).run(run):
        assert operations == [("all_reduce", n) for n in largest_and_sums + picked]


@pytest.mark.parametrize(
    ("split", "sizes"), [(2, (3, 6)), pytest.param(1, (5, 0), marks=pytest.mark.conformance)]
)
def test_compiled(split, sizes):
    def some(x, target, index):
        return (
            F.mse_loss(x, target),
            F.l1_loss(x, target, weight=target),
            F.cross_entropy(x, index),
            F.poisson_nll_loss(x, target),
            F.triplet_margin_loss(x, target, x * target, swap=True),
            F.multilabel_soft_margin_loss(x, target),
        )

    inputs = [X, TARGET, INDEX]
    parity(some, inputs, [split, None, None], (2,), [sizes], compiled=True, dtype=torch.float64)


def test_wrong_arguments():
    error = sf.LayoutError
    local = TARGET[:, :, :5]
    refused(F.soft_margin_loss, [X, local], [2, None], error=error, match="never this rank's")
    refused(F.cross_entropy, [X, INDEX[:, :5]], [2, None], error=error, match="never this rank's")
    refused(F.multi_margin_loss, [X[0, 0], INDEX[0, :3, 0]], [0, None], error=error, match="never")
    with pytest.warns(UserWarning, match="Using a target size"):
        refused(F.mse_loss, [X, local], [2, None], error=error)
