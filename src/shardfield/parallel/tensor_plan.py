"""Which parameters are split over the axis `tensor`, and how: a plan to print, edit and keep."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from shardfield.axes import TENSOR, MeshAxes
from shardfield.errors import LayoutError
from shardfield.layout import Factor, Layout, balanced


@dataclass(frozen=True)
class Split:
    """How one dim of a parameter is split: an outer whole factor, units, an inner whole factor.

    A fused projection of 3 x 8 heads of width 64 is split by heads as `Split(0, 3, 8, 64)`; a
    plain matrix of 256 rows by rows as `Split(0, 1, 256, 1)`.

    Attributes:
        dim: the dim.
        outer: parts that every rank has some of (queries, keys, values; gate and value).
        units: what is dealt out: heads, hidden features, vocabulary rows.
        inner: rows of one unit.
        extents: units of every tensor rank; by default balanced.
    """

    dim: int
    outer: int
    units: int
    inner: int
    extents: tuple[int, ...] = ()

    def layout(self, shape: tuple[int, ...], mesh: MeshAxes, name: str = "a parameter") -> Layout:
        """The parameter's layout.

        Raises:
            LayoutError: the split does not fit the shape or the mesh.
        """
        ranks = mesh.size((TENSOR,))
        extents = self.extents or balanced(self.units, ranks)
        if (
            not -len(shape) <= self.dim < len(shape)
            or shape[self.dim] != self.outer * self.units * self.inner
            or len(extents) != ranks
            or sum(extents) != self.units
            or min(extents) < 0
        ):
            raise LayoutError(
                f"{self} of {name}, shape {shape}, over {ranks} tensor rank(s)",
                "outer x units x inner is the size of the dim, and the extents add up to the units",
                "correct the rule, or leave it out: the parameter is then whole on every rank",
                "tensor-parallel",
            )
        dims: list[tuple[Factor, ...]] = [(Factor(size),) for size in shape]
        dims[self.dim] = (
            Factor(self.outer),
            Factor(self.units, (TENSOR,), extents),
            Factor(self.inner),
        )
        return Layout(mesh, dims)


@dataclass(frozen=True)
class TensorPlan:
    """The split parameters of a model, by name; all others are whole on every rank.

    Attributes:
        splits: the rules.
        shapes: global shapes of the model's parameters, for printing; may be empty.
        ranks: tensor ranks that the extents are made for.

    Example:
        >>> plan = TensorPlan({"fc1.weight": Split(0, 1, 8, 1)}, {"fc1.weight": (8, 4)}, 2)
        >>> plan.with_rules({"fc1.*": None}).splits
        {}
    """

    splits: Mapping[str, Split] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ranks: int = 1

    def with_rules(self, rules: Mapping[str, Split | None]) -> TensorPlan:
        """The plan with some parameters split otherwise, or (None) not at all.

        Args:
            rules: by name, or by a pattern with `*`, `?` and `[...]`; later rules win.

        Raises:
            LayoutError: a pattern that matches no parameter.
        """
        splits = dict(self.splits)
        for pattern, split in rules.items():
            names = [n for n in {**self.shapes, **splits} if fnmatchcase(n, pattern)]
            if not names:
                raise LayoutError(
                    f"a rule for {pattern!r}",
                    "the pattern matches no parameter",
                    "compare with the names that print(plan) shows",
                    "tensor-parallel",
                )
            for name in names:
                if split is None:
                    splits.pop(name, None)
                else:
                    splits[name] = split
        return replace(self, splits=splits)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        named = {name: asdict(split) for name, split in self.splits.items()}
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        content = {"ranks": self.ranks, "splits": named, "shapes": shapes}
        Path(path).write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> TensorPlan:
        """Reads what `save` wrote.

        Raises:
            LayoutError: the file holds something else.
        """
        try:
            content: dict[str, Any] = json.loads(Path(path).read_text())
            splits = {
                name: Split(**{**fields, "extents": tuple(fields["extents"])})
                for name, fields in content["splits"].items()
            }
            shapes = {name: tuple(shape) for name, shape in content["shapes"].items()}
            return cls(splits, shapes, int(content["ranks"]))
        except (KeyError, TypeError, ValueError) as error:
            raise LayoutError(
                f"TensorPlan.load({str(path)!r})",
                f"the file is no plan: {error}",
                "write one with plan.save(path)",
                "tensor-parallel",
            ) from error

    def __str__(self) -> str:
        width = max([len(name) for name in self.shapes or self.splits] + [9])
        lines = [f"{'parameter':{width}}  shape           split over {self.ranks} tensor ranks"]
        whole = held = 0
        for name in self.shapes or self.splits:
            shape, split = self.shapes.get(name, ()), self.splits.get(name)
            whole += prod(shape)
            shown = "whole"
            share = prod(shape)
            if split is not None:
                extents = split.extents or balanced(split.units, self.ranks)
                share = prod(shape) * max(extents) // split.units
                units = "+".join(map(str, extents))
                parts = [f"{split.outer} x ({units})" if split.outer > 1 else units]
                parts += [f"x {split.inner}"] if split.inner > 1 else []
                shown = f"dim {split.dim}: {' '.join(parts)}"
            held += share
            lines.append(f"{name:{width}}  {'x'.join(map(str, shape)):14}  {shown}")
        if whole:
            lines.append(f"parameters of the largest rank: {held} of {whole} ({held / whole:.3f})")
        return "\n".join(lines)


__all__ = ["Split", "TensorPlan"]
