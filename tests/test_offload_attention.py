"""`offload="attention"`: inputs of stages and results of attention wait on the host.

Random decoders compare its gradients with eager's.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import pytest
from torch import fx

import streamfx
from streamfx.cost.memory import bytes_like, cost_of
from streamfx.ir.facts import known
from streamfx.options import SAVE_LEVELS, resolve_options
from streamfx.runtime.offload import free_after_copy, wait_for_copy
from tests.support.planned import Traced
from tests.support.stages import Layers

LAYERS = 3


@pytest.fixture(scope="module")
def traced() -> Traced:
    return Traced(Layers(LAYERS))


def names_of(nodes: Iterable[Iterable[fx.Node]]) -> set[str]:
    return {node.name for node in chain(*nodes)}


@pytest.mark.parametrize("save", ["auto", SAVE_LEVELS[-1]])
def test_attention_runs_once_and_its_results_wait_on_the_host(traced: Traced, save: str) -> None:
    """FLOPs are those of the level of `save`; all that level "attention" keeps waits on the host, and all inputs, but not what
    higher levels keep.
    """
    level = "attention" if save == "auto" else save
    facts, device = traced.facts(offload="attention", save=save), traced.facts(offload="none", save=level)
    program, results = known(facts.program), names_of(traced.facts(offload="none", save="attention").plan.kept)
    assert len(results) == 2 * LAYERS and results <= names_of(device.plan.kept) == names_of(facts.plan.kept)

    on_host = [node for node in program.saved if node.target is free_after_copy]
    waiting = results | names_of(stage.outputs for stage in facts.stages[: LAYERS - 1])
    assert {node.meta["joint"] for node in on_host} == waiting and len(waiting) == 3 * LAYERS - 1
    assert {node.meta.get("joint") for node in program.saved if node not in on_host}.isdisjoint(waiting)

    costs = [cost_of(known(one.program).forward, known(one.program).backward, 1) for one in (facts, device)]
    assert (costs[0].flops, costs[0].work.attention_flops) == (costs[1].flops, costs[1].work.attention_flops)
    assert costs[1].held - costs[0].held == sum(bytes_like(node.meta["val"]) for node in on_host)


def test_each_run_fetches_the_values_that_it_reads(traced: Traced) -> None:
    """With `keep_every=3`, two loops that are not consecutive read results of attention."""
    graph = known(known(traced.facts(offload="attention", keep_every=3).program).backward).graph
    fetched = graph.find_nodes(op="call_function", target=wait_for_copy)
    held = [node.all_input_nodes[0].all_input_nodes[0] for node in fetched]
    assert len(held) > len(set(held))


OPTIONS: dict[str, Any] = {"save": "inputs", "offload": "attention"}
WAYS: dict[str, Callable[[], Any]] = {
    "one dictionary": lambda: streamfx.configure(options=OPTIONS),
    "options": lambda: streamfx.Options(**OPTIONS),
    "two places": lambda: resolve_options({"offload": "attention"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_save_level_that_keeps_no_attention_is_refused(way: str) -> None:
    words = r"(?s)save='inputs' keeps none.*do +omit save, or give offload='inputs'"
    with streamfx.configure(save="inputs"), pytest.raises(streamfx.OptionError, match=words):
        WAYS[way]()


def test_a_budget_is_searched_among_plans_that_keep_attention(traced: Traced) -> None:
    auto = {"chunk_size": "auto", "loss_chunk_size": "auto"}
    facts = traced.facts(offload="attention", memory_budget="1GiB", **auto)
    levels = [tried.candidate.save for tried in known(facts.search_trace).candidates]
    assert levels[0] == "attention" and len(levels) > 1, "what takes the least is found out first"
    assert names_of(facts.plan.kept) == names_of(traced.facts(save="products").plan.kept)
