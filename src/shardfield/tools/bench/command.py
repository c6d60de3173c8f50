"""`shardfield bench`: everything that is claimed about time and memory, measured in one run."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

NAMES = (
    "tiny",
    "conv stack",
    "conv stack, FSDP2",
    "conv3d stack",
    "U-Net",
    "SegResNet",
    "UNet2DModel",
    "attention 4096",
    "attention 16384",
    "ViT blocks",
    "attention 4096, bf16",
    "attention 16384, bf16",
    "ViT blocks, bf16",
    "tensor blocks",
    "memory",
    "batches",
)


def bench(
    only: Annotated[
        list[str] | None, typer.Option(help=f"Run only this (repeatable): {', '.join(NAMES)}.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks that share a sample.")] = 2,
    pairs: Annotated[int, typer.Option(min=1, help="Interleaved pairs.")] = 15,
    scale: Annotated[
        int, typer.Option(min=1, help="Divide all spatial extents, for a quick look.")
    ] = 1,
    out: Annotated[Path, typer.Option(help="Folder for bench.json and bench.png.")] = Path("out"),
) -> None:
    """Time and memory of sharded training steps against hand-written ones and one process.

    The whole table takes about a quarter of an hour on two otherwise idle cores. Exits with 1 when
    a target is missed.
    """
    from shardfield.tools.bench import batches, contest, keeping, tiny
    from shardfield.tools.bench.launch import launch
    from shardfield.tools.bench.report import Results, draw, show

    chosen = list(only or NAMES)
    if unknown := sorted(set(chosen) - set(NAMES)):
        raise typer.BadParameter(f"{unknown}: choose from {list(NAMES)}", param_hint="--only")
    console = Console()
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    if busy > 0.5:
        # Ranks wait for each other: one that shares its core holds up all of them.
        console.print(
            f"[yellow]Other programs are running (load {busy:.1f} on {cores} cores): the ratios "
            "will scatter, and those of sharded steps will be too high.[/]"
        )
    results = Results(ranks=ranks, pairs=pairs, load_before=busy)
    if "tiny" in chosen:
        with console.status("tiny block"):
            results.tiny = launch(tiny.run, 1, pairs)
    for name in chosen:
        if name not in ("tiny", "memory", "batches"):
            with console.status(name):
                results.contests += launch(contest.run, ranks, pairs, [name], scale)
    if "memory" in chosen:
        networks = [model.name for model in keeping.models()]
        with console.status("memory"):
            rows = launch(keeping.run, ranks, networks, keeping.MODES, scale)
        results.keeping = [keeping.Keeping(**row) for row in rows]
    if "batches" in chosen:
        with console.status("batches"):
            rows = launch(batches.run, ranks, max(scale, 8))
        results.batches = [batches.Intensity(**row) for row in rows]
    show(results, console)
    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.json").write_text(results.as_json())
    written = [str(out / "bench.json")]
    if results.ratios():
        try:
            draw(results, out / "bench.png")
            written.append(str(out / "bench.png"))
        except ImportError:
            console.print(
                "No figure: matplotlib is not installed (pip install 'shardfield[demo]')."
            )
    console.print("Written:", ", ".join(written))
    missed = [r for r in results.ratios() if not r.met]
    missed += [k for k in results.keeping if k.kept > k.bound]
    if missed:
        raise typer.Exit(1)
