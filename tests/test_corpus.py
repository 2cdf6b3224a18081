"""Captured graphs, without tracing: what the passes make of each has the results of the graph."""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from streamfx.options import Options
from streamfx.passes.partition.plan_simulator import by_stage
from tests.corpus.entries import Entry, Found, kept_in
from tests.corpus.written import written
from tests.support.budgets import ladder_of
from tests.support.goldens import BASE, torch_version
from tests.support.spread import only, spread

NAMES = Entry.all()
BYTES = {name: Entry.bytes_of(name) for name in NAMES}
LARGE = {name for name in NAMES if BYTES[name] > 40_000}
SLOW = {"zoo-bailing_hybrid", "zoo-hy_v4", "zoo-hrm_text"}  # run only with `--long`
MARKS = {name: pytest.mark.compiled for name in NAMES if BYTES[name] > 20_000}  # not in the quick run
GRAPHS = [pytest.param(name, marks=pytest.mark.long if name in SLOW else MARKS.get(name, ())) for name in NAMES]
kept = cache(kept_in)


@pytest.mark.parametrize("name", GRAPHS)
def test_rewritten_graphs_have_the_results_of_the_graph(name: str, request: pytest.FixtureRequest) -> None:
    """And their loops and reasons are those of the kept file, FLOPs and the peak of each 16th graph, of all with `--long`.

    `python -m tests.corpus write` writes the file.
    """
    one = Entry.load(name)
    facts = one.analysed(check_passes=False)
    one.check(facts)
    found = Found.of(facts, costs=request.config.getoption("--long") or name in NAMES[::16]).plain
    if torch_version() != BASE:
        del found["listing"]  # another version of FX names a few nodes otherwise
    assert found == {key: kept()[name][key] for key in found}


@pytest.mark.parametrize("name", spread(NAMES[::16], 4))
def test_a_graph_is_read_as_it_was_written(name: str) -> None:
    read_only = Entry.load(name)  # passes ask more of sizes, and torch notes what it is asked
    assert written(read_only.module) == read_only.graph


def test_graphs_without_loops_are_few() -> None:
    """The comparison above says nothing about a graph that runs as it is."""
    assert kept().keys() == set(NAMES)
    assert sum(not found["loops"] for found in kept().values()) < 0.05 * len(kept())


# -- one law for all that may be chosen: other loops, the same numbers

CHOICES: tuple[dict[str, Any], ...] = (
    {"chunk_size": 1, "loss_chunk_size": 2},
    {"chunk_size": 3, "loss_chunk_size": 7, "save": "attention"},
    {"chunk_size": 100, "loss_chunk_size": 1},
    {"save": "projections", "keep_every": 2},
    {"save": "products", "offload": "attention"},
    {"save": "attention", "offload": "inputs", "keep_every": 3},
    {"chunk_size": 4, "save": "inputs", "keep_every": 2, "check_passes": True},
    {"accumulate": "same", "chunk_size": 7},
)


@pytest.mark.parametrize("name", only([name for name in NAMES[::12] if name not in LARGE], NAMES))
def test_the_results_do_not_depend_on_what_is_chosen(name: str, request: pytest.FixtureRequest) -> None:
    """Chunk sizes, what is saved, offloaded and kept: each graph with one choice, with all of them by `--long`."""
    place = NAMES.index(name)
    choices = CHOICES if request.config.getoption("--long") else (CHOICES[place // 20 % len(CHOICES)],)
    for choice in choices:
        one = Entry.load(name)
        one.check(one.analysed(**choice))


@pytest.mark.parametrize("name", only([name for name in NAMES[5::40] if name not in LARGE], NAMES))
def test_the_results_do_not_depend_on_how_many_stages_are_planned_richer(name: str) -> None:
    """Neighbors on the ladder of plans are mixed at two stages: one keeps more values, or more boundaries, than the other."""
    one, options = Entry.load(name), Options(keep_every="auto")
    facts = one.analysed(check_passes=False)
    if facts.program is None:
        pytest.skip("nothing streams")
    ladder = ladder_of(facts, options)
    for richer, poorer in pairwise(ladder.ladder):
        for mixture in ladder.mixtures(poorer, richer):
            plan, *others = (by_stage(ladder.simulator.facts_with_plan(each).plan) for each in (mixture, richer, poorer))
            assert plan not in others
            one.check(ladder.simulator.facts_with_program(mixture))
