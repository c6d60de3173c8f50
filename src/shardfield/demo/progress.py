"""A progress bar on the first rank; plain lines where there is no terminal."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINES = 4  # how often a run reports where a bar cannot be drawn


class StepProgress:
    """Shows how far a training run is.

    Args:
        title: what is running.
        steps: number of steps to come.
        shown: False on the ranks that stay silent.
    """

    def __init__(self, title: str, steps: int, shown: bool) -> None:
        self.title, self.steps, self.shown = title, steps, shown
        self.console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeRemainingColumn(),
            console=self.console,
            expand=True,
            disable=not (shown and self.console.is_terminal),
        )
        self.task = self.bar.add_task(title, total=steps, loss="-")

    def __enter__(self) -> "StepProgress":
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def advance(self, step: int, loss: float) -> None:
        """Notes that `step` (counted from 0) ended with `loss`."""
        self.bar.update(self.task, advance=1, loss=f"{loss:.5f}")
        done = step + 1
        if self.shown and self.bar.disable and done * LINES % self.steps < LINES:
            self.console.print(f"{self.title}: step {done}/{self.steps}, loss {loss:.5f}")
