"""Medians of paired ratios and how far chance could have moved them."""

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple


class Interval(NamedTuple):
    """A median with the bounds of its confidence interval."""

    median: float
    low: float
    high: float


def paired_ratio(
    numerators: Sequence[float], denominators: Sequence[float], confidence: float = 0.95
) -> Interval:
    """The median of the ratios within pairs, with a distribution-free interval.

    Times measured back to back share the machine's mood, so their ratio is steady where the times
    are not. The interval is the narrowest symmetric pair of order statistics that covers the true
    median with at least `confidence` (of 15 pairs: the 4th and the 12th, 96.5 %); below 6 pairs
    none does, and the extremes are given.

    Raises:
        ValueError: unequal lengths, or no pair.

    Source: David and Nagaraja, Order Statistics, 3rd ed., section 7.1.

    Example:
        >>> from shardfield.tools.bench.intervals import paired_ratio
        >>> paired_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 2.0])
        Interval(median=2.0, low=2.0, high=3.0)
    """
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    if not ratios:
        raise ValueError("paired_ratio needs at least one pair")
    count = len(ratios)
    trim = _trimmed(count, confidence)
    return Interval(median(ratios), ratios[trim], ratios[count - 1 - trim])


def _trimmed(count: int, confidence: float) -> int:
    """How many order statistics may be left out at each end."""
    trim, outside = 0, 1 / 2**count
    while trim + 1 < (count + 1) // 2:
        outside += math.comb(count, trim + 1) / 2**count
        if 1 - 2 * outside < confidence:
            break
        trim += 1
    return trim
