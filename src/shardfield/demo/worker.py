"""What every rank of a demo run executes; `launch` starts it under torchrun."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist

import shardfield as sf
from shardfield.demo.data import SHAPE, awkward_sizes, load_volume
from shardfield.demo.progress import StepProgress
from shardfield.demo.train import EXACT_STEPS, Run, build_model, split, train


def main() -> None:
    """Trains, and leaves the runs of all ranks in a file: a list, the first rank first."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--plain", action="store_true", help="plain torch, the reference")
    arguments = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    mesh = None if arguments.plain else sf.init_mesh(domain=ranks)
    title = "plain torch, 1 rank" if mesh is None else f"shardfield, {ranks} ranks"
    whole = load_volume() if rank == 0 else None

    def run(dtype: torch.dtype, steps: int) -> Run:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = build_model().to(device, dtype)
        volume = whole.to(device, dtype) if whole is not None else None
        if mesh is not None:
            model, volume = split(model, volume, mesh, awkward_sizes(SHAPE[2], ranks))
        assert volume is not None
        name = f"{title}, {str(dtype).removeprefix('torch.')}"
        with StepProgress(name, steps, shown=rank == 0) as progress:
            return train(model, volume, steps, progress.advance)

    exact = run(torch.float64, EXACT_STEPS)
    result = run(torch.float32, arguments.steps)
    result.exact = exact
    results = [result] * ranks
    if mesh is not None:
        dist.gather_object(result, results if rank == 0 else None)
        dist.destroy_process_group()
    if rank == 0:
        torch.save(results, arguments.result)


if __name__ == "__main__":
    main()
