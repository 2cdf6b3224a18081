"""The joint graph and the result of each pass as text, in the order in which the passes run.

Passes rewrite the graph in place, so the texts are written while the passes run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import unified_diff
from typing import Any

from streamfx.errors import ReportError
from streamfx.ir.facts import Facts
from streamfx.tools.report.printer import package_of, product_text

GRAPH = "canonicalize"  # the pass whose result is the joint graph


@dataclass(frozen=True)
class PassText:
    """The joint graph after a pass and the result of the pass, as text; and the package of the pass."""

    graph: str
    result: str
    package: str


def pass_texts(run: Callable[[Callable[[Any, Facts], None]], Any]) -> dict[str, PassText]:
    """Return the texts by the name of the pass; `run` runs all passes, and calls its argument with each pass and the facts."""
    texts: dict[str, PassText] = {}

    def add(applied_pass: Any, facts: Facts) -> None:
        name = applied_pass.name
        texts.pop(name, None)  # passes run again if an operator falls back
        texts[name] = PassText(product_text(GRAPH, facts), product_text(name, facts), package_of(applied_pass))

    run(add)
    return texts


def diff_of(texts: Mapping[str, PassText], before: str, after: str) -> str:
    """Return the unified diff of the texts after two passes, given by name or by package (its last pass)."""
    first, last = _pass_named(before, texts), _pass_named(after, texts)
    old, new = _text_after(first, texts).splitlines(), _text_after(last, texts).splitlines()
    lines = unified_diff(old, new, f"after {first}", f"after {last}", lineterm="")
    return "".join(f"{line}\n" for line in lines)


def _pass_named(name: str, texts: Mapping[str, PassText]) -> str:
    """Return the name of a pass, given its name or that of its package."""
    matching = [known for known, text in texts.items() if name in (known, text.package)]
    if not matching:
        raise ReportError(
            "diff takes the names of passes, or of their packages", found=repr(name), do=f"give two of {', '.join(texts)}"
        )
    return name if name in matching else matching[-1]


def _text_after(name: str, texts: Mapping[str, PassText]) -> str:
    """Return the joint graph after a pass, then the results of the passes up to this one."""
    names = list(texts)
    results = "".join(f"# {known}\n{texts[known].result}" for known in names[: names.index(name) + 1] if known != GRAPH)
    return f"# graph\n{texts[name].graph}{results}"
