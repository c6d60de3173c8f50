"""Every error a user can meet. All of them are raised from layouts, hence alike on every rank."""

from __future__ import annotations


class ShardfieldError(RuntimeError):
    """Base of shardfield's errors: what was asked, the rule broken, the way out, where to read."""

    def __init__(self, asked: str, rule: str = "", fix: str = "", docs: str = "") -> None:
        self.asked, self.rule, self.fix, self.docs = asked, rule, fix, docs
        lines = [asked]
        lines += [f"  {name}: {text}" for name, text in (("rule", rule), ("fix", fix)) if text]
        if docs:
            lines.append(f"  docs: docs/errors.md#{docs}")
        super().__init__("\n".join(lines))

    def __reduce__(self):
        return type(self), (self.asked, self.rule, self.fix, self.docs)


class UnsupportedOperation(ShardfieldError):
    """The operation has no exact sharded form for this layout; nothing was communicated."""


class LayoutError(ShardfieldError):
    """Sizes, placements or operands do not fit together; nothing was communicated."""


class RankFailure(ShardfieldError):
    """Another rank raised, or left out a collective; names the rank and the operation."""
