"""The command line: `shardfield COMMAND`. Each command is a thin call into the package."""

import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shardfield.tools.bench.command import bench

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def shardfield() -> None:
    """Train and run PyTorch models on samples too large for one device."""


@app.command()
def demo(
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks to split over; default: every GPU, else 2.")
    ] = None,
    steps: Annotated[int, typer.Option(min=3, help="Training steps of each run.")] = 40,
    out: Annotated[Path, typer.Option(help="Folder for table and picture.")] = Path("out/demo"),
) -> None:
    """Train an unmodified 3-D U-Net on an MRI volume split over ranks, and compare with one."""
    console = Console()
    missing = [name for name in ("monai", "nilearn", "matplotlib") if find_spec(name) is None]
    if missing:
        console.print(f"the demo needs {', '.join(missing)}: pip install 'shardfield\\[demo]'")
        raise typer.Exit(2)
    from shardfield.demo.launch import default_ranks, run_demo

    try:
        run_demo(ranks or default_ranks(), steps, out, console)
    except subprocess.CalledProcessError as failure:
        console.print("a run of the demo failed; its error stands above")
        raise typer.Exit(failure.returncode) from None


app.command()(bench)


if __name__ == "__main__":
    app()
