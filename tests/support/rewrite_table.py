"""The page `docs/rewrites.md`: every rewrite rule with its before and after, from the docstrings of the rules."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from streamfx.passes.rewrite.canonicalize import LATE_RULES, RULES
from streamfx.passes.rewrite.pattern import RewriteRule

PAGE = Path(__file__).parents[2] / "docs" / "rewrites.md"
HEAD = """\
# Rewrite rules

The pass `canonicalize` applies these rules to the joint graph until none applies. Each rule replaces one operator, with its
neighbors, by an equal graph that later passes can read; it may round differently if its row says so. `->` separates before and
after. A golden file shows each rule on a graph that it rewrites and on one that only looks similar
(`tests/goldens/equation.*.txt`). This page comes from the docstrings of the rules: `pytest tests/test_docs.py --update-goldens`
writes it.
"""
SUBJECTS = {
    "views": "Views, indices, constants and concatenations",
    "attention": "Attention",
    "loss": "Losses",
    "moe": "Mixtures of experts",
    "scans": "Scans and convolutions",
    "collectives": "Collectives",
}


def page() -> str:
    """Return the text of the page: a section per subject, in the order of `SUBJECTS`."""
    rules = sorted((*RULES, *LATE_RULES), key=lambda rule: (list(SUBJECTS).index(_subject(rule)), _file(rule)))
    sections = (_section(SUBJECTS[subject], list(own)) for subject, own in groupby(rules, _subject))
    return "\n".join([HEAD, *sections])


def _section(title: str, rules: list[RewriteRule]) -> str:
    rows = (f"| {rule.name} | `{_file(rule)}` | {'<br>'.join(_lines(rule.text))} |" for rule in rules)
    return "\n".join([f"## {title}", "", "| rule | file | before -> after |", "|---|---|---|", *rows, ""])


def _lines(text: str) -> Iterator[str]:
    """Yield the cell of a rule: the first paragraph as code, line by line, and the others as text."""
    rewrite, *others = text.replace("|", "\\|").split("\n\n")
    yield from (f"`{' '.join(line.split())}`" for line in rewrite.splitlines())
    yield from (" ".join(other.split()) for other in others)


def _subject(rule: RewriteRule) -> str:
    return rule.rewrite.__module__.split(".")[-2]


def _file(rule: RewriteRule) -> str:
    return f"{rule.rewrite.__module__.split('.')[-1]}.py"
