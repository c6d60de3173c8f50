"""Error messages send their reader to a section that exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RAISERS = {"LayoutError", "RankFailure", "ShardfieldError", "UnsupportedOperation", "unsupported"}
DOCS = 3  # position of the docs id among their arguments


def refusals():
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in RAISERS:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def cited_sections() -> set[str]:
    cited = {"operations"}  # what registry.unsupported falls back to
    for _, node in refusals():
        docs = [keyword.value for keyword in node.keywords if keyword.arg == "docs"]
        docs += node.args[DOCS : DOCS + 1]
        cited |= {ast.literal_eval(value) for value in docs if _is_text(value)}
    return cited


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value != ""


def test_every_cited_section_is_written():
    written = set(re.findall(r"^## (\S+)$", (ROOT / "docs/errors.md").read_text(), re.MULTILINE))
    cited = cited_sections()
    assert len(cited) > 3
    assert cited <= written


def test_every_refusal_says_what_was_asked_the_rule_the_fix_and_where_to_read():
    lacking = [
        place
        for place, call in refusals()
        if ast.unparse(call.func) != "unsupported"  # which knows a fix and a section for all
        and not any(isinstance(value, ast.Starred) for value in call.args)
        and (
            len(call.args) + len(call.keywords) < DOCS + 1
            or any(isinstance(v, ast.Constant) and v.value == "" for v in call.args)
        )
    ]
    assert lacking == []


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"
