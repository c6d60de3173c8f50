"""The demo's table and picture."""

from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median

from rich.table import Table
from torch import Tensor

from shardfield.demo.data import Volume
from shardfield.demo.train import MEASURED_STEP, Run


def table(reference: Run, sharded: list[Run], sizes: list[int], threads: int) -> Table:
    """Compares a sharded run with one process that held the whole volume.

    Args:
        reference: the run in plain torch on one rank.
        sharded: the same steps split over ranks, one entry a rank.
        sizes: rows of D on each rank.
        threads: threads that every rank computed with.
    """
    first, costs = sharded[0], [run.cost for run in sharded]
    rows = " + ".join(map(str, sizes)) if len(sizes) <= 8 else str(sum(sizes))
    result = Table(
        title=f"MONAI UNet on the MNI152 T1, threads per rank: {threads}",
        caption=(
            "float32 runs part by rounding: sums over ten million voxels.\n"
            "Bytes: tensors in float32, on the rank that has most."
        ),
    )
    result.add_column("")
    result.add_column("1 rank\nplain torch", justify="right")
    result.add_column(f"{len(sizes)} ranks\n{rows} rows", justify="right")
    result.add_column("compared", justify="right")

    def add(title: str, form: str, one: float, many: float, compared: str) -> None:
        result.add_row(title, form.format(one), form.format(many), compared)

    for one, many in ((reference.exact, first.exact), (reference, first)):
        _add_results(result, one, many)
    one, many = reference.cost.kept / 1e6, max(cost.kept for cost in costs) / 1e6
    add("kept for backward", "{:.1f} MB", one, many, f"{many / one:.3f} of one")
    one, many = reference.cost.peak / 1e6, max(cost.peak for cost in costs) / 1e6
    add("peak in a step", "{:.1f} MB", one, many, f"{many / one:.3f} of one")
    sent = max(cost.sent for cost in costs) / 1e6
    collectives = max(cost.collectives for cost in costs)
    result.add_row("sent in a step", "-", f"{sent:.2f} MB", f"{collectives} collectives")
    result.add_row("gradients averaged", "-", f"{first.parameters / 1e6:.2f} MB", "by DDP")
    one, many = _typical(reference), max(map(_typical, sharded))
    add("time of a step", "{:.2f} s", one, many, f"{one / many:.2f}x as fast")
    return result


def _add_results(result: Table, one: Run | None, many: Run | None) -> None:
    assert one is not None
    assert many is not None
    assert one.prediction is not None
    assert many.prediction is not None
    losses = one.losses[-1], many.losses[-1]
    dtype = str(one.prediction.dtype).removeprefix("torch.")
    distance = (one.prediction - many.prediction).abs().max().item()
    result.add_row(
        f"loss, step {len(one.losses)}, {dtype}",
        *(f"{loss:.10f}" for loss in losses),
        f"differ by {abs(losses[0] - losses[1]):.1e}",
    )
    result.add_row("  prediction then", "", "", f"by at most {distance:.1e}")


def _typical(run: Run) -> float:
    """Median seconds of a step; the first steps also allocate and are measured."""
    return median(run.seconds[MEASURED_STEP + 1 :])


def draw(volume: Volume, prediction: Tensor, sizes: list[int], path: Path) -> None:
    """Draws slices of input, prediction and target, with the cuts between the ranks.

    Args:
        volume: global (1, 1, D, H, W) input and target.
        prediction: global (1, 1, D, H, W), in [0, 1].
        sizes: rows of D on each rank.
        path: PNG to write.
    """
    from matplotlib.figure import Figure

    H, W = prediction.shape[3:]
    low, high = volume.image.min().item(), volume.image.max().item()
    # Outside the head the image is exactly 0, its mean; drawn black, as radiologists see it.
    image = volume.image.masked_fill(volume.image == 0, low)
    columns = (
        ("T1 image (input)", image, "gray", (low, high)),
        (f"prediction on {len(sizes)} ranks", prediction, "magma", (0, 1)),
        ("grey-matter density (target)", volume.target, "magma", (0, 1)),
    )
    figure = Figure(figsize=(10, 8.2), layout="compressed")
    grid = figure.subplots(2, len(columns), height_ratios=(H, W))
    for column, (title, values, colors, (low, high)) in enumerate(columns):
        grid[0, column].set_title(title)
        for axes, plane in zip(
            grid[:, column], (values[0, 0, :, :, W * 9 // 20], values[0, 0, :, H // 2]), strict=True
        ):
            drawn = axes.imshow(plane.T.numpy(), cmap=colors, origin="lower", vmin=low, vmax=high)
            _mark_cuts(axes, sizes)
    figure.colorbar(drawn, ax=grid, location="bottom", shrink=0.5, pad=0.02, label="density")
    grid[0, 0].set_ylabel("axial")
    grid[1, 0].set_ylabel("coronal")
    figure.savefig(path, dpi=120)


def _mark_cuts(axes, sizes: list[int]) -> None:
    """Marks the borders between the ranks along the horizontal axis."""
    axes.set(xticks=[], yticks=[])
    for rank, (begin, end) in enumerate(pairwise(accumulate(sizes, initial=0))):
        if begin:
            axes.axvline(begin - 0.5, color="cyan", linestyle="--", linewidth=0.8)
        if len(sizes) <= 8:
            label = f"rank {rank}\n{end - begin} rows" if len(sizes) <= 4 else str(rank)
            axes.text((begin + end) / 2, 4, label, color="cyan", ha="center", fontsize=7)
