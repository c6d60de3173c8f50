"""The table a person reads, the figure, and the JSON a program reads."""

import json
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from shardfield.tools.bench.batches import Intensity
from shardfield.tools.bench.intervals import Interval, paired_ratio
from shardfield.tools.bench.keeping import Keeping


@dataclass(frozen=True)
class Ratio:
    """One comparison: a ratio of paired times and what it should be.

    Attributes:
        name: What is compared.
        interval: The median ratio and its interval.
        target: The bound it is judged by.
        at_most: Whether the target is an upper bound.
        detail: The median times, in words.
        processor: The median ratio of the processor times.
    """

    name: str
    interval: Interval
    target: float
    at_most: bool
    detail: str
    processor: float

    @property
    def met(self) -> bool:
        """Whether the median meets the target."""
        value = self.interval.median
        return value <= self.target if self.at_most else value >= self.target


@dataclass
class Results:
    """Everything one run of the benchmark measured."""

    tiny: dict[str, Any] | None = None
    contests: list[dict[str, Any]] = field(default_factory=list)
    keeping: list[Keeping] = field(default_factory=list)
    batches: list[Intensity] = field(default_factory=list)
    ranks: int = 2
    pairs: int = 15
    load_before: float = 0.0

    def ratios(self) -> list[Ratio]:
        """The comparisons of the times, in the order of the table."""
        found = []
        if self.tiny is not None:
            sharded, plain = self.tiny["sharded"], self.tiny["plain"]
            interval = paired_ratio(sharded, plain)
            detail = f"{median(sharded):.1f} / {median(plain):.1f} µs per op"
            name = "tiny block / plain torch"
            found.append(Ratio(name, interval, 1.8, True, detail, interval.median))
        for contest in self.contests:
            name = contest["workload"]
            # Only the convolution stack computes enough for a promise of speed-up.
            faster = 1.6 if name == "conv stack" else 1.0
            rivals = [k for k in contest["seconds"] if k not in ("shardfield", "one process")]
            best = min(rivals, key=lambda kind: median(contest["seconds"][kind]))
            found += [
                _ratio(f"{name} / {best}", contest, ("shardfield", best), 1.05, True),
                _ratio(
                    f"{name}: one process / shardfield",
                    contest,
                    ("one process", "shardfield"),
                    faster,
                    False,
                ),
            ]
        return found

    def as_json(self) -> str:
        """All measurements with the machine they were taken on."""
        return json.dumps(
            {
                "machine": {
                    "torch": torch.__version__,
                    "processor": platform.processor() or platform.machine(),
                    "cores": os.cpu_count(),
                    "load_before": self.load_before,
                },
                "ranks": self.ranks,
                "pairs": self.pairs,
                "ratios": [
                    {
                        "name": r.name,
                        **r.interval._asdict(),
                        "target": r.target,
                        "met": r.met,
                        "processor": r.processor,
                    }
                    for r in self.ratios()
                ],
                "tiny_us_per_op": self.tiny,
                "contests": self.contests,
                "batches": [{**vars(b), "per_byte": b.per_byte} for b in self.batches],
                "memory": [
                    {**vars(k), "ratio": k.kept / k.one, "bound": k.bound} for k in self.keeping
                ],
            },
            indent=1,
        )


def _ratio(
    name: str, contest: dict[str, Any], pair: tuple[str, str], target: float, at_most: bool
) -> Ratio:
    clock = [contest["seconds"][kind] for kind in pair]
    busy = [contest["processor"][kind] for kind in pair]
    detail = f"{median(clock[0]) * 1e3:.0f} / {median(clock[1]) * 1e3:.0f} ms"
    processor = paired_ratio(*busy).median
    return Ratio(name, paired_ratio(*clock), target, at_most, detail, processor)


def show(results: Results, console: Console) -> None:
    """Prints the tables."""
    ratios = results.ratios()
    if ratios:
        table = Table(
            title=f"Time: median of {results.pairs} interleaved pairs, {results.ranks} ranks, "
            "one thread each"
        )
        for column in (
            "comparison",
            "times",
            "ratio",
            "95 % interval",
            "target",
            "",
            "of processor time",
        ):
            table.add_column(column, justify="left" if column == "comparison" else "right")
        for ratio in ratios:
            low, high = ratio.interval.low, ratio.interval.high
            sign = "≤" if ratio.at_most else "≥"
            table.add_row(
                ratio.name,
                ratio.detail,
                f"{ratio.interval.median:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{sign} {ratio.target}",
                "[green]met[/]" if ratio.met else "[red]missed[/]",
                f"{ratio.processor:.3f}",
            )
        console.print(table)
    if results.keeping:
        table = Table(title="Memory: bytes kept for backward by the rank that keeps most")
        for column in ("network", "mode", "one process", "a rank", "of one", "halos", "bound", ""):
            table.add_column(column, justify="left" if column in ("network", "mode") else "right")
        for row in results.keeping:
            table.add_row(
                row.network,
                row.mode,
                _mb(row.one),
                _mb(row.kept),
                f"{row.kept / row.one:.3f}",
                _mb(row.slabs),
                _mb(row.bound),
                "[green]met[/]" if row.kept <= row.bound else "[red]missed[/]",
            )
        console.print(table)
    if results.batches:
        table = Table(title="Computation for each byte a rank sends, as the batch grows")
        for column in ("network", "batch", "operations", "activations", "gradients", "per byte"):
            table.add_column(column, justify="left" if column == "network" else "right")
        for count in results.batches:
            table.add_row(
                count.network,
                str(count.batch),
                f"{count.flops / 1e9:.2f} G",
                _mb(count.activations),
                _mb(count.gradients),
                f"{count.per_byte:.0f}",
            )
        console.print(table)


def _mb(count: float) -> str:
    return f"{count / 1e6:.2f} MB"


def draw(results: Results, path: Path) -> None:
    """Draws each ratio with its interval and target to a PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    ratios = results.ratios()[::-1]
    figure = Figure(figsize=(9, 1.2 + 0.5 * len(ratios)), layout="constrained")
    axes = figure.subplots()
    for place, ratio in enumerate(ratios):
        value, low, high = ratio.interval
        colour = "tab:green" if ratio.met else "tab:red"
        axes.plot([low, high], [place, place], color=colour, linewidth=3, alpha=0.5)
        axes.plot(value, place, "o", color=colour)
        axes.plot([ratio.target] * 2, [place - 0.3, place + 0.3], color="black")
    axes.set_yticks(range(len(ratios)), [r.name for r in ratios])
    axes.set_xlabel("ratio of times: median and 95 % interval of the pairs; black: target")
    axes.axvline(1, color="grey", linewidth=0.5)
    figure.savefig(path, dpi=120)
