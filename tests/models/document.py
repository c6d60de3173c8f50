"""Writes docs/models.md from the tables: `python -m models.document`, with tests/ on the path."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from models.entry import Model
from models.refused import REFUSED
from models.table import MODELS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"

INTRODUCTION = """\
# Models that run as they are

Every model below comes from its own package and is not changed. In the test suite it trains two
steps (forward, loss, backward, AdamW) and then infers under `torch.inference_mode()`, in float64,
on 2 and on 3 ranks with uneven shards that start at odd rows. Losses, outputs, parameters and
buffers equal those of plain torch in one process to 1e-10. `make conformance` adds the large ones,
and each under `shardfield.compile`.

The tables are written by `tests/models/document.py` from those that the tests run. "Input" is the
global shape, its split dim in bold. Sizes are small because tests are; nothing depends on them.

Versions: {versions}.

What a caller has to know:

- A model with parameters that take no part in the loss (marked *unused*) needs
  `parallelize(..., find_unused_parameters=True)`, as with `DistributedDataParallel` alone.
- Dropout and other random numbers of split tensors follow the global index. They do not depend on
  the ranks or the split, but are not the numbers that torch would draw; the tests give plain torch
  the same, or compare with the same program on one rank (*one rank*).
"""

REFUSALS = """\
## Not yet

These raise `UnsupportedOperation` before anything is sent.

| model | package | first operation that is missing |
|---|---|---|
"""


def page() -> str:
    """The text of docs/models.md."""
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
    parts = [INTRODUCTION.format(versions=versions)]
    for package in dict.fromkeys(model.package for model in MODELS.values()):
        title = "Written out in plain torch" if package == "torch" else package
        rows = "\n".join(_rows(m for m in MODELS.values() if m.package == package))
        parts.append(f"## {title}\n\n| model | dims | input | notes |\n|---|---|---|---|\n{rows}\n")
    missing = []
    for model, operation in REFUSED.values():
        name = f"`{model.name}` {model.notes}".rstrip()
        missing.append(f"| {name} | {model.package} | `{operation}` |")
    parts.append(REFUSALS + "\n".join(missing) + "\n")
    return "\n".join(parts)


def _rows(models: Iterable[Model]) -> Iterable[str]:
    for model in models:
        sizes = [f"**{n}**" if d == model.split else str(n) for d, n in enumerate(model.shape)]
        flags = {"unused": model.unused, "one rank": model.drawn, "conformance": model.long}
        notes = [model.notes, *(f"*{flag}*" for flag, given in flags.items() if given)]
        notes = "; ".join(note for note in notes if note)
        kind = "tokens" if model.words else f"{len(model.shape) - 2}-D"
        yield f"| `{model.name}` | {kind} | {' x '.join(sizes)} | {notes} |"


def _versions() -> dict[str, str]:
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    packages = dict.fromkeys(["torch", *(model.package for model in MODELS.values())])
    return {name: pinned[name] for name in packages}


if __name__ == "__main__":
    PAGE.write_text(page())
