"""Starts the demo's two runs, each under torchrun, and reports on them."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console

from shardfield.demo.data import SHAPE, awkward_sizes, load_volume
from shardfield.demo.report import draw, table
from shardfield.demo.train import Run

# The profiler that reads the allocator announces itself on stderr otherwise.
QUIET = {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def default_ranks() -> int:
    """One rank a GPU where there are several, else 2 on the CPU."""
    return max(2, torch.cuda.device_count())


def run_demo(ranks: int, steps: int, out: Path, console: Console) -> None:
    """Trains on one rank in plain torch, then on `ranks` ranks, and compares.

    Args:
        ranks: ranks to split the volume over, all on this machine.
        steps: updates of each run.
        out: folder for the picture and the table.
        console: where the table is printed.

    Raises:
        subprocess.CalledProcessError: a run failed; its own error is on stderr.
    """
    out.mkdir(parents=True, exist_ok=True)
    sizes = awkward_sizes(SHAPE[2], ranks)
    environment = {**os.environ, **QUIET}
    threads = max(1, (os.cpu_count() or 1) // ranks)
    environment["OMP_NUM_THREADS"] = str(threads)
    if ranks > torch.cuda.device_count():
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "runs.pt"
        (reference,) = _torchrun(1, steps, environment, result, "--plain")
        sharded = _torchrun(ranks, steps, environment, result)

    summary = table(reference, sharded, sizes, threads)
    console.print(summary)
    with (out / "demo.txt").open("w") as file:
        Console(file=file, width=100).print(summary)
    prediction = sharded[0].prediction
    assert prediction is not None
    draw(load_volume(), prediction, sizes, out / "demo.png")
    console.print(f"picture: {out / 'demo.png'}")


def _torchrun(
    ranks: int, steps: int, environment: dict[str, str], result: Path, *options: str
) -> list[Run]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = ["--nproc-per-node", str(ranks), "-m", "shardfield.demo.worker"]
    arguments = ["--steps", str(steps), "--result", str(result), *options]
    subprocess.run([*launcher, *program, *arguments], env=environment, check=True)
    return torch.load(result, weights_only=False)
