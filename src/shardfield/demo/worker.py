"""What every rank of a demo run executes; `launch` starts it under torchrun."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist

import shardfield as sf
from shardfield.demo.data import SHAPE, awkward_sizes, load_volume
from shardfield.demo.progress import StepProgress
from shardfield.demo.train import build_model, split, train


def main() -> None:
    """Trains and leaves the runs of all ranks in a file: a list, the first rank first."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--plain", action="store_true", help="plain torch, the reference")
    arguments = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    mesh = None if arguments.plain else sf.init_mesh(domain=ranks)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model().to(device)
    volume = load_volume().to(device) if rank == 0 else None
    title = "plain torch, 1 rank"
    if mesh is not None:
        model, volume = split(model, volume, mesh, awkward_sizes(SHAPE[2], ranks))
        title = f"shardfield, {ranks} ranks"
    assert volume is not None
    with StepProgress(title, arguments.steps, shown=rank == 0) as progress:
        run = train(model, volume, arguments.steps, progress.advance)

    runs = [run]
    if mesh is not None:
        runs = [run] * ranks
        dist.all_gather_object(runs, run)
        dist.destroy_process_group()
    if rank == 0:
        torch.save(runs, arguments.result)


if __name__ == "__main__":
    main()
