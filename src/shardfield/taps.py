"""Taps of `interpolate`: rows that torch reads for every output row, and their weights. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True, slots=True)
class Taps:
    """Input rows and weights of every output row of one dim.

    Attributes:
        rows: per tap, the input row of each output row.
        weights: per tap, its weight; none where the one tap counts fully.
    """

    rows: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[float, ...], ...] = ()


@lru_cache(maxsize=512)
def taps(
    mode: str, size: int, out: int, align_corners: bool, scale: float | None, double: bool
) -> Taps:
    """Which rows torch reads for every output row, and how it weighs them.

    Args:
        scale: the scale factor, where torch uses it instead of the ratio of the sizes.
        double: torch computes positions in float64 for float64 tensors, else in float32.

    Source: ATen/native/UpSample.h and cpu/UpSampleKernel.cpp. Computed in the same precision, in
    numpy so that plans can be made under FakeTensorMode too.
    """
    number = np.float64 if double else np.float32
    at = np.arange(out).astype(number)
    half = number(0.5)
    align_corners = align_corners and not mode.startswith("nearest")
    ratio = _ratio(size, out, align_corners, scale, number)
    if mode.endswith("antialias"):
        return _antialias_taps(mode, size, ratio * (at + half), ratio)
    from_zero = align_corners or mode == "nearest"
    position = ratio * at if from_zero else ratio * (at + half) - half
    if mode.startswith("nearest"):
        if mode == "nearest-exact":
            position = np.maximum(position, 0) + half
        # torch rounds with floorf, hence in float32, whatever the dtype.
        rows = [_bounded(np.floor(position.astype(np.float32)), size)]
        weights = []
    elif mode == "bicubic":
        first = np.floor(position)
        t = position - first
        rows = [_bounded(first + k, size) for k in (-1, 0, 1, 2)]
        weights = [_outer(t + 1), _inner(t), _inner(1 - t), _outer(2 - t)]
    else:
        position = np.maximum(position, 0)
        first = np.minimum(np.floor(position), size - 1)
        t = np.clip(position - first, 0, 1)
        rows = [_bounded(first, size), _bounded(first + 1, size)]
        weights = [1 - t, t]
    return Taps(
        tuple(tuple(row.tolist()) for row in rows),
        tuple(tuple(weight.tolist()) for weight in weights),
    )


def _ratio(size: int, out: int, align_corners: bool, scale: float | None, number):
    """Input rows per output row."""
    if align_corners:
        return number(size - 1) / number(out - 1) if out > 1 else number(0)
    return number(1 / scale) if scale else number(size) / number(out)


def _antialias_taps(mode: str, size: int, centre: np.ndarray, ratio) -> Taps:
    """The filter is as wide as the rows that an output row stands for, and adds up to 1."""
    cubic = mode.startswith("bicubic")
    stretch = max(ratio, type(ratio)(1))
    support = (2 if cubic else 1) * stretch
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    stop = np.minimum((centre + support + 0.5).astype(np.int64), size)
    count = max(int((stop - first).max(initial=1)), 1)
    rows = [np.minimum(first + tap, stop - 1) for tap in range(count)]
    weights = []
    for tap in range(count):
        x = np.abs((first + tap - centre + 0.5) / stretch)
        if cubic:
            weight = np.where(x < 1, _inner(x, -0.5), np.where(x < 2, _outer(x, -0.5), 0))
        else:
            weight = np.maximum(1 - x, 0)
        weights.append(np.where(first + tap < stop, weight, 0))
    total = sum(weights)
    return Taps(
        tuple(tuple(_bounded(row, size).tolist()) for row in rows),
        tuple(tuple((weight / total).tolist()) for weight in weights),
    )


def _bounded(rows: np.ndarray, size: int) -> np.ndarray:
    return np.clip(rows.astype(np.int64), 0, size - 1)


_A = -0.75  # torch's cubic coefficient


def _inner(t: np.ndarray, a: float = _A) -> np.ndarray:
    return ((a + 2) * t - (a + 3)) * t * t + 1


def _outer(t: np.ndarray, a: float = _A) -> np.ndarray:
    return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
