import io

import torch
from rich.console import Console

from shardfield.demo.data import Volume
from shardfield.demo.measure import StepCost
from shardfield.demo.report import draw, table
from shardfield.demo.train import Run


def shown(renderable) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(renderable)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_table_takes_the_worst_rank():
    prediction = torch.full((1, 1, 4, 4, 4), 0.5)
    reference = Run(StepCost(kept=100_000_000, peak=200_000_000), 4_000_000, [1.0, 0.5], [9, 9, 2])
    reference.prediction = prediction
    sharded = [
        Run(StepCost(51_000_000, 120_000_000, 1_000_000, 7), 4_000_000, [1.0, 0.6], [9, 9, 1]),
        Run(StepCost(50_000_000, 130_000_000, 2_000_000, 7), 4_000_000, [1.0, 0.6], [9, 9, 1.6]),
    ]
    reference.exact_loss, sharded[0].exact_loss = 0.25, 0.25 + 1e-12
    sharded[0].prediction = prediction + 0.25
    text = shown(table(reference, sharded, [3, 1], threads=1))
    for expected in ("float64", "difference 1.0e-12", "float32"):
        assert expected in text
    for expected in ("3 + 1 rows", "difference 1.0e-01", "at most 2.5e-01 apart", "0.510 of one"):
        assert expected in text
    for expected in ("0.650 of one", "2.00 MB", "7 collectives", "4.00 MB", "1.25x as fast"):
        assert expected in text


def test_picture_is_written(tmp_path):
    x = torch.rand(1, 1, 12, 10, 8)
    draw(Volume(x, x), x, [7, 5], tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
