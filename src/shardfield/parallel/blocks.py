"""Which submodules are one unit: gathered together, recomputed together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from torch import nn

from shardfield.errors import LayoutError

Wrap = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)


def blocks_of(model: nn.Module, wrap: Wrap | None = None) -> list[nn.Module]:
    """The blocks of a model, in the order of its `modules()`; the model itself is none.

    Args:
        wrap: a class, several, or a function that says of each submodule whether it is a block;
            blocks may then contain others. By default, the repeated ones: members of a ModuleList,
            ModuleDict or Sequential that are made of other modules, of a class that occurs there
            at least twice. Of those the outermost, unless a class contains itself.

    Raises:
        LayoutError: `wrap` fits nothing.

    Example:
        >>> layer = lambda: nn.TransformerEncoderLayer(8, 2)
        >>> model = nn.Sequential(nn.Linear(3, 8), layer(), layer(), nn.Linear(8, 3))
        >>> [type(block).__name__ for block in blocks_of(model)]
        ['TransformerEncoderLayer', 'TransformerEncoderLayer']
    """
    if wrap is None:
        return list(dict.fromkeys(_outermost(model, _repeated(model))))
    chosen = wrap if callable(wrap) and not isinstance(wrap, type) else _instance_of(wrap)
    found = [module for module in model.modules() if module is not model and chosen(module)]
    if not found:
        raise LayoutError(
            f"parallelize({type(model).__name__}, wrap={wrap})",
            "no submodule is of that kind",
            "name the class of the model's blocks, or leave wrap out",
            "parallelize",
        )
    return found


def outermost(blocks: list[nn.Module]) -> list[nn.Module]:
    """Blocks that are not part of another one."""
    inner = {id(part) for block in blocks for part in block.modules() if part is not block}
    return [block for block in blocks if id(block) not in inner]


def self_contained(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Blocks that share no parameter with the rest of the model (tied weights do)."""
    holders = _holders(model)
    return [block for block in blocks if _holders(block).items() <= holders.items()]


def _holders(model: nn.Module) -> Counter[int]:
    """How many modules hold each parameter, by identity."""
    return Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )


def _instance_of(kinds) -> Callable[[nn.Module], bool]:
    return lambda module: isinstance(module, kinds)


def _repeated(model: nn.Module) -> set[type[nn.Module]]:
    members = {
        id(member): member
        for container in model.modules()
        if isinstance(container, _CONTAINERS)
        for member in container.children()
        if next(member.children(), None) is not None
        and next(member.parameters(), None) is not None
        and not isinstance(member, _WITHOUT_FORWARD)
    }
    kinds = Counter(type(member) for member in members.values())
    nested = {
        type(member)
        for member in members.values()
        if any(type(part) is type(member) and part is not member for part in member.modules())
    }
    return {kind for kind, count in kinds.items() if count > 1} - nested


def _outermost(module: nn.Module, kinds: set[type[nn.Module]]) -> Iterator[nn.Module]:
    inside = isinstance(module, _CONTAINERS)
    for child in module.children():
        if inside and type(child) in kinds and next(child.parameters(), None) is not None:
            yield child
        else:
            yield from _outermost(child, kinds)


__all__ = ["Wrap", "blocks_of", "outermost", "self_contained"]
