"""Predicted figures in README and docs are those of docs/figures.json, which `python -m benchmarks.figures` writes."""

from __future__ import annotations

import json

import pytest

from benchmarks.figures import BLOCK, BLOCKS, COMMANDS, FILE, PAGES

FIGURES = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", BLOCKS)
def test_pages_quote_the_file(name: str) -> None:
    quoted = [found[3] for page in PAGES for found in BLOCK.finditer(page.read_text()) if found[2] == name]
    assert quoted == [BLOCKS[name](FIGURES)], "run python -m benchmarks.figures --pages"


def test_figures_are_of_commands_that_are_there() -> None:
    assert {name: found["command"] for name, found in FIGURES.items()} == {
        name: f"streamfx plan {command}" for name, command in COMMANDS.items()
    }
    assert all(found["commit"] for found in FIGURES.values())
