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


def a_run(cost: StepCost, losses: list[float], prediction: torch.Tensor, last_step: float) -> Run:
    exact = Run(StepCost(), 0, losses[:1], prediction=prediction.double())
    seconds = [9.0, 9.0, last_step]
    return Run(cost, 4_000_000, losses, seconds, prediction, exact)


def test_table_takes_the_worst_rank():
    half = torch.full((1, 1, 4, 4, 4), 0.5)
    reference = a_run(StepCost(100_000_000, 200_000_000), [1.0, 0.5], half, 2.0)
    sharded = [
        a_run(StepCost(51_000_000, 120_000_000, 1_000_000, 7), [1.0, 0.6], half + 0.25, 1.0),
        a_run(StepCost(50_000_000, 130_000_000, 2_000_000, 7), [1.0, 0.6], half, 1.6),
    ]
    text = shown(table(reference, sharded, [3, 1], threads=1))
    for expected in ("step 1, float64", "differ by 0.0e+00", "step 2, float32", "by 1.0e-01"):
        assert expected in text
    for expected in ("3 + 1 rows", "at most 2.5e-01", "0.510 of one", "0.650 of one"):
        assert expected in text
    for expected in ("2.00 MB", "7 collectives", "4.00 MB", "1.25x as fast"):
        assert expected in text


def test_picture_is_written(tmp_path):
    x = torch.rand(1, 1, 12, 10, 8)
    draw(Volume(x, x), x, [7, 5], tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
