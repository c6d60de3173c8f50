"""Runs the whole matrix and writes docs/matrix.md: `make matrix`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from matrix.cells import ACTIVATIONS, ALL, LIMIT, MESHES, STEPS, Cell, Outcome, run
from matrix.nets import NETS

PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"

INTRODUCTION = f"""\
# Parallelism together

Each cell is a training of {STEPS} steps (AdamW, gradients clipped to one global norm, uneven
shards) in float64 on a mesh. It shows the largest difference of a final parameter or of a loss from
the same training in one process: activations kept / recomputed. All have to be below {LIMIT:.0e}.
Weights are split over `tensor` by the derived plan; "sequence" is `sequence_parallel=True` (a U-Net
has no tokens); FSDP2 and HSDP are `params="shard"` and `"hybrid"`; networks of tokens or points
have one dim to split, so that h x w does not apply.
Pipelines with all of these are in `tests/parallel/test_pipeline.py`.

`make matrix` runs all cells and writes this page; the suite runs a subset in which every two of
mesh, network and activations meet.

"""


def page(outcomes: dict[Cell, Outcome]) -> str:
    """The text of docs/matrix.md."""
    lines = [f"| mesh | {' | '.join(NETS)} |", "|---" * (len(NETS) + 1) + "|"]
    for mesh in MESHES:
        cells = []
        for net in NETS:
            found = [outcomes.get(Cell(mesh, net, activations)) for activations in ACTIVATIONS]
            cells.append(" / ".join(f"{max(o):.0e}" for o in found if o is not None) or "-")
        lines.append(f"| {mesh} | {' | '.join(cells)} |")
    return INTRODUCTION + "\n".join(lines) + "\n"


def rows(text: str) -> list[str]:
    """The meshes that a page shows."""
    return re.findall(r"^\| ([^|]*?) \|.*e-", text, re.MULTILINE)


def main() -> int:
    """Runs all cells; returns how many differ."""
    console = Console(stderr=True)
    outcomes: dict[Cell, Outcome] = {}
    wrong = 0
    with Progress(console=console) as progress:
        task = progress.add_task("matrix", total=len(ALL))
        for cell in ALL:
            progress.update(task, description=" | ".join(cell))
            outcomes[cell] = run(cell)
            if not max(outcomes[cell]) < LIMIT:
                wrong += 1
                console.print(f"{' | '.join(cell)}: {outcomes[cell]}")
            progress.advance(task)
    PAGE.write_text(page(outcomes))
    return wrong


if __name__ == "__main__":
    sys.exit(main())
