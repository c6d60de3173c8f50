"""Convolutions, plain and transposed, against one process: CASES 1 to 8."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    Window,
    examples,
    grouped_channels,
    padding_modes,
    splits,
    transposed_windows,
    windows,
)
from torch import nn

from shardfield.plan import transposed_window, wanted_whole
from shardfield.testing import parity, refused

torch.manual_seed(0)

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
F64 = torch.float64


def image(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


# The faults of other systems


def test_case_1_patches_of_four_over_four_ranks():
    report = parity(nn.Conv2d(3, 4, 4, stride=4), [image(2, 3, 8, 16)], [3], output="sharded")
    assert report.share <= 0.5


@pytest.mark.parametrize("dim", [2, 3])
def test_case_2_k3_p1_plain_and_depthwise(dim: int):
    x = image(2, 4, 9, 8)
    parity(nn.Conv2d(4, 3, 3, padding=1), [x], [dim], output="sharded", double=True)
    parity(nn.Conv2d(4, 4, 3, padding=1, groups=4), [x], [dim], ranks=(4,), output="sharded")


@pytest.mark.parametrize("dim", [2, 3, 4])
def test_case_2_conv3d_k3_p1(dim: int):
    x = image(1, 2, 5, 6, 7)
    parity(nn.Conv3d(2, 2, 3, padding=1), [x], [dim], ranks=(2, 4), output="sharded")


CASE_3 = {
    "k3 s2 p1": (17, {"kernel_size": 3, "stride": 2, "padding": 1}, [(9, 8)]),
    "k3 s2 p1 even": (16, {"kernel_size": 3, "stride": 2, "padding": 1}, [(9, 7)]),
    "k3 s2 p0": (17, {"kernel_size": 3, "stride": 2}, [(9, 8), (8, 9)]),
    "k7 s2 p3": (16, {"kernel_size": 7, "stride": 2, "padding": 3}, [(9, 7), (2, 14)]),
    "k1 s2": (17, {"kernel_size": 1, "stride": 2}, [(9, 8), (8, 9)]),
    "k1 p1": (9, {"kernel_size": 1, "padding": 1}, [(5, 4), (9, 0)]),
    "k3 s3 p0": (17, {"kernel_size": 3, "stride": 3}, [(9, 8), (10, 7)]),
    "k3 d2 p2": (16, {"kernel_size": 3, "dilation": 2, "padding": 2}, [(9, 7), (1, 15)]),
    "k4 s4": (16, {"kernel_size": 4, "stride": 4}, [(10, 6)]),
    "k2 s2": (16, {"kernel_size": 2, "stride": 2}, [(9, 7)]),
}


@pytest.mark.parametrize("name", CASE_3)
def test_case_3_shards_that_do_not_start_at_multiples_of_the_stride(name: str):
    rows, options, sizes = CASE_3[name]
    conv = nn.Conv2d(2, 3, **options)
    x = image(2, 2, rows, rows)
    for dim in (2, 3):
        parity(conv, [x], [dim], ranks=(2,), sizes=sizes, dtype=F64, output="sharded")
    parity(conv, [x], [2], ranks=(3, 4), dtype=F64, output="sharded")


SAME = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch's own


@SAME
@pytest.mark.parametrize(
    "options",
    [{"kernel_size": 4, "padding": 1}, {"kernel_size": 2}, {"kernel_size": 4, "padding": "same"}],
    ids=str,
)
def test_case_4_even_overlapping_kernels(options):
    parity(nn.Conv2d(2, 3, **options), [image(2, 2, 9, 8)], [2], dtype=F64, double=True)


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_case_4_padding_modes(mode: str):
    conv = nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode=mode)
    x = image(2, 2, 9, 8)
    parity(conv, [x], [2], dtype=F64, output="sharded")
    parity(conv, [x], [3], ranks=(3,), dtype=F64, output="sharded")


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_case_4_padding_mode_of_an_unsplit_dim_only(mode: str):
    conv = nn.Conv2d(2, 3, (1, 3), padding=(0, 1), padding_mode=mode)
    parity(conv, [image(2, 2, 9, 8)], [2], ranks=(2, 3), dtype=F64, output="sharded")


def test_case_5_halo_wider_than_the_neighbours_shard():
    conv = nn.Conv1d(2, 3, 9, padding=4)
    sizes = [(1, 1, 1), (1, 1, 1, 1), (1, 0, 3), (0, 1, 1, 3)]
    for rows in (3, 4, 5):
        fitting = [extents for extents in sizes if sum(extents) == rows]
        x = image(2, 2, rows)
        for extents in fitting:
            parity(conv, [x], [2], ranks=(len(extents),), sizes=[extents], double=True)


def test_case_5_more_ranks_than_rows():
    parity(nn.Conv1d(2, 3, 5, padding=2), [image(2, 2, 2)], [2], ranks=(1, 3, 4), dtype=F64)
    parity(nn.Conv1d(2, 3, 3, stride=2), [image(2, 2, 3)], [2], ranks=(1, 2, 4), dtype=F64)


def test_case_5_twelve_rows_over_eight_ranks():
    conv = nn.Conv1d(2, 3, 3, padding=1)
    parity(conv, [image(2, 2, 12)], [2], ranks=(8,), sizes=[(2,) * 6 + (0, 0)], dtype=F64)


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
        {"kernel_size": 4, "stride": 2, "padding": 1},
        {"kernel_size": 2, "stride": 2},
    ],
    ids=str,
)
def test_case_6_transposed_on_odd_shards(options):
    conv = nn.ConvTranspose2d(2, 3, **options)
    parity(conv, [image(2, 2, 9, 7)], [2], output="sharded", double=True)
    parity(conv, [image(2, 2, 5, 9)], [3], ranks=(2,), sizes=[(4, 5), (9, 0)], dtype=F64)


def test_case_7_a_domain_of_ranks_2_and_3_of_4():
    # The sweep adds the ranks [2, 3] of 4 wherever it reaches 4 ranks.
    report = parity(nn.Conv2d(2, 3, 5, 2, 2), [image(2, 2, 9, 4)], [2], ranks=(2, 4), dtype=F64)
    alone = parity(
        nn.Conv2d(2, 3, 5, 2, 2), [image(2, 2, 9, 4)], [2], ranks=(2, 4), dtype=F64, subgroup=False
    )
    assert report.cases == alone.cases + 2


# Anything else


@st.composite
def geometry(draw: st.DrawFn, transposed: bool = False):
    """A convolution, plain or transposed, of 1 to 3 dims, with one dim split; and its input."""
    count = draw(st.sampled_from([1, 1, 2, 2, 3]))
    channels, outputs, groups = draw(grouped_channels())
    split = draw(st.integers(0, count - 1))
    names = ["kernel_size", "stride", "padding", "dilation"]
    options: dict[str, list[int]] = {name: [] for name in names}
    extras, shape = [], []
    for dim in range(count):
        small = {"max_kernel": 3, "max_size": 6} if count > 1 and dim != split else {}
        if transposed:
            case, extra = draw(transposed_windows(max_size=4 if small else 8))
            extras.append(extra)
        else:
            case = draw(windows(**{"max_size": 14, **small}))
        for name, value in zip(
            names, (case.kernel, case.stride, case.padding, case.dilation), strict=True
        ):
            options[name].append(value)
        shape.append(case.size)
    if transposed:
        options["output_padding"] = extras
    kinds = TRANSPOSED if transposed else CONVS
    sides = {name: tuple(values) for name, values in options.items()}
    conv = kinds[count](channels, outputs, groups=groups, bias=draw(st.booleans()), **sides)
    lead = draw(st.sampled_from([(2, channels), (1, channels), (channels,)]))
    x = torch.randn(*lead, *shape)
    extents = draw(splits(shape[split], draw(st.integers(2, 4))))
    return conv, x, len(lead) + split, extents


def is_reached_by_all(conv, dim: int, extents: tuple[int, ...]) -> bool:
    """Whether the output rows of every rank come from all input rows, as dilation can have it.

    Every rank then does all the work of a transposed convolution, whose extra rows are dropped.
    """
    if not conv.transposed:
        return False
    options = (conv.kernel_size, conv.stride, conv.padding, conv.output_padding, conv.dilation)
    plan = transposed_window(extents, *(option[dim] for option in options))
    return plan.wanted == wanted_whole(sum(extents), len(extents))


def check(drawn, double: bool = False) -> None:
    conv, x, dim, extents = drawn
    lead = x.dim() - len(conv.kernel_size)
    options = {"sizes": [extents], "dtype": F64, "subgroup": False, "double": double}
    options["whole"] = is_reached_by_all(conv, dim - lead, extents)
    parity(conv, [x], [dim], ranks=(len(extents),), **options)


@examples(60)
@given(geometry())
def test_any_convolution(drawn):
    check(drawn)


@examples(60)
@given(geometry(transposed=True))
def test_any_transposed_convolution(drawn):
    check(drawn)


@examples(12)
@given(geometry(), geometry(transposed=True))
def test_any_convolution_differentiated_twice(plain, transposed):
    check(plain, double=True)
    check(transposed, double=True)


@examples(20)
@given(windows(max_size=8, max_kernel=3), padding_modes(), st.data())
def test_any_padding_mode(case: Window, mode: str, data):
    size = max(case.size, case.padding + 1)  # torch reflects less than one whole dim
    conv = nn.Conv1d(2, 2, case.kernel, case.stride, case.padding, case.dilation, padding_mode=mode)
    extents = data.draw(splits(size, data.draw(st.integers(2, 4))))
    parity(conv, [image(2, 2, size)], [2], ranks=(len(extents),), sizes=[extents], dtype=F64)


@examples(15)
@given(windows(max_size=8), windows(max_size=8), st.data())
def test_any_window_on_a_mesh_of_two_axes(first: Window, second: Window, data):
    both = (first, second)
    conv = nn.Conv2d(
        2,
        2,
        *[
            tuple(getattr(case, name) for case in both)
            for name in ("kernel", "stride", "padding", "dilation")
        ],
    )
    sizes = {axis: data.draw(splits(case.size, 2)) for axis, case in zip("hw", both, strict=True)}
    x = image(1, 2, first.size, second.size)
    parity(conv, [x], [{2: "h", 3: "w"}], ranks=(4,), sizes=[sizes], dtype=F64, double=True)


# Meshes, batches, formats


def test_mesh_of_two_axes():
    x = image(2, 2, 9, 8)
    parity(nn.Conv2d(2, 3, 3, 2, 1), [x], [{2: "h", 3: "w"}], output="sharded")
    conv = nn.ConvTranspose2d(2, 3, 3, 2, 1, output_padding=1)
    parity(conv, [x], [{2: "h", 3: "w"}], ranks=(4,), dtype=F64, output="sharded")


def test_three_dims_on_a_mesh_of_two_axes():
    conv = nn.Conv3d(1, 2, (3, 2, 5), (1, 2, 2), (1, 0, 2))
    parity(conv, [image(2, 1, 5, 6, 7)], [{2: "h", 4: "w"}], ranks=(4,), dtype=F64)


@pytest.mark.parametrize("conv", [nn.Conv2d(2, 3, 3, 1, 1), nn.ConvTranspose2d(2, 3, 3, 2, 1)])
def test_batch_split_and_batch_beside_a_split_dim(conv):
    x = image(3, 2, 6, 5)
    parity(conv, [x], [0], dtype=F64, output="sharded", double=True)
    parity(conv, [x], [{0: "b", 2: "h"}], ranks=(2, 4), dtype=F64, output="sharded")


@pytest.mark.parametrize("conv", [nn.Conv2d(2, 3, 3, 2, 1), nn.ConvTranspose2d(2, 3, 3, 2, 1)])
def test_unbatched_input(conv):
    parity(conv, [image(2, 7, 5)], [1], output="sharded")
    parity(conv, [image(2, 7, 5)], [2], ranks=(3,), dtype=F64, output="sharded")


@SAME
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("kernel", [3, 4, (2, 5)])
def test_padding_by_name(padding: str, kernel):
    conv = nn.Conv2d(2, 3, kernel, padding=padding, dilation=(1, 2))
    parity(conv, [image(2, 2, 7, 12)], [2], ranks=(2, 3), dtype=F64, output="sharded")
    parity(conv, [image(2, 2, 7, 12)], [3], ranks=(2,), dtype=F64, output="sharded")


@pytest.mark.parametrize("conv", [nn.Conv2d(2, 4, 3, 1, 1), nn.ConvTranspose2d(2, 4, 2, 2)])
def test_channels_last(conv):
    def net(x, weight, bias):
        x = x.to(memory_format=torch.channels_last)
        if isinstance(conv, nn.Conv2d):
            return F.conv2d(x, weight, bias, 1, 1)
        return F.conv_transpose2d(x, weight, bias, 2)

    params = {"weight": conv.weight.detach(), "bias": conv.bias.detach()}
    parity(net, [image(2, 2, 6, 5)], [2], params=params, output="sharded")


def test_a_chain_that_keeps_reduces_and_doubles():
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(4, 4, 3, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 2, 2, 2),
    )
    parity(net, [image(2, 2, 9, 8)], [2], output="sharded", double=True)
    parity(net, [image(2, 2, 9, 8)], [{2: "h", 3: "w"}], ranks=(4,), dtype=F64)


def test_input_without_a_gradient_and_frozen_weights():
    conv = nn.Conv2d(2, 3, 3, padding=1)

    def frozen(x):
        weight = conv.weight.detach().to(x.dtype)
        return F.conv2d(x, weight, None, padding=1)

    def detached(x, weight):
        return F.conv2d(x.detach(), weight, None, padding=1) + x.sum(1, keepdim=True)

    x = image(2, 2, 5, 4)
    parity(frozen, [x], [2], ranks=(2, 3), dtype=F64)
    parity(detached, [x], [2], ranks=(2, 3), dtype=F64, params={"weight": conv.weight.detach()})


@pytest.mark.parametrize("conv", [nn.Conv2d(4, 4, 3, padding=1), nn.ConvTranspose2d(4, 4, 2, 2)])
def test_split_channels_are_refused_before_communication(conv):
    text = refused(conv, [image(2, 4, 6, 5)], [1], match=r"its channels \(dim 1\) are split")
    assert "conv" in text.splitlines()[0]
    assert "(2, 4, 6, 5) split: dim 1 over domain as" in text.splitlines()[0]
    assert len(text.splitlines()) == 4
    refused(conv, [image(4, 6, 5)], [0], match=r"its channels \(dim 0\) are split")
    refused(conv, [image(2, 4, 6, 5)], [{1: "h", 2: "w"}], ranks=(4,), match="channels")


def test_weights_split_over_the_axis_of_the_rows_are_refused_before_communication():
    weight = image(4, 2, 3, 3)
    refused(lambda x, w: F.conv2d(x, w), [image(1, 2, 6, 5), weight], [2, 0], match="weight")


def test_a_window_larger_than_the_padded_input_is_an_error_on_all_ranks():
    text = refused(
        nn.Conv2d(2, 2, 5), [image(1, 2, 4, 6)], [2], error=RuntimeError, match="Kernel size"
    )
    assert "can't be greater than" in text


def test_merged_dims_move_to_contiguous_ranges():
    def merged(x, weight):
        return F.conv1d(x.flatten(2), weight)  # rows by columns, the columns split

    x, weight = image(2, 2, 3, 4), image(2, 2, 3)
    parity(merged, [x, weight], [3, None], dtype=torch.float64)
