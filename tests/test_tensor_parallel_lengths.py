"""Layers that `parallelize_module` cuts over ranks, called with several lengths: torch makes the length a symbol."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from tests.support.collectives import data_of, worst
from tests.support.over_ranks import facts_of, one_of_many
from tests.support.ranks import on_ranks
from tests.test_distributed import compiled, twins
from tests.test_tensor_parallel import cut

pytestmark = pytest.mark.long

LENGTHS = (24, 40, 33)
PLANS: dict[str, Callable[[], Any]] = {
    "columns, then rows": lambda: {"0": ColwiseParallel(), "1": RowwiseParallel()},
    "columns, gathered": lambda: {"0": ColwiseParallel(output_layouts=Replicate())},
    "rows, split first": lambda: {"0": RowwiseParallel(input_layouts=Replicate())},
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_size_is_not_computed_from_itself(plan: str) -> None:
    """DTensor takes `sym_max(length, 1)` for a gradient, whose symbol is the length's: tracing ended in a RecursionError."""
    with one_of_many(2):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        parallelize_module(model, init_device_mesh("cpu", (2,)), PLANS[plan]())
        x = torch.randn(1, 12, 8, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 1)
        facts = facts_of(lambda x: model(x).square().sum(), [x])
    assert facts.program is not None and facts.failed is None
    placeholders = {node.name for node in facts.joint.graph.find_nodes(op="placeholder")}
    numbers = [node for node in facts.joint.graph.nodes if isinstance(node.meta.get("val"), torch.SymInt)]
    assert numbers and all(node.op == "placeholder" or uses(node) <= placeholders for node in numbers), "sizes of results"


def uses(node: Any) -> set[str]:
    """The inputs of a graph that a value is computed from."""
    if node.op == "placeholder":
        return {node.name}
    return set().union(*map(uses, node.all_input_nodes))


def errors(
    model: nn.Module, truth: nn.Module, run: Callable[..., Tensor], true: Callable[..., Tensor], length: int
) -> tuple[float, float]:
    """How far the loss and the gradients of a step are from those of one process."""
    losses = [call(*data_of(0, length)) for call in (run, true)]
    for own, loss in zip((model, truth), losses, strict=True):
        own.zero_grad()
        loss.backward()
    return (losses[0] - losses[1]).abs().item(), worst(model, truth)


def of_several_lengths(rank: int) -> list[tuple[float, float, int]]:
    """By length, the errors of a step, and how many graphs were compiled by then."""
    model, truth = twins(layers=1, vocabulary=18)
    run, stats = compiled(cut(model), strict=True), torch._dynamo.utils.counters["stats"]
    with loss_parallel():
        return [(*errors(model, truth, run, truth, length), stats["unique_graphs"]) for length in LENGTHS]


def test_gradients_of_several_lengths() -> None:
    """Layers are cut by heads, embedding, head and loss by words; the third length is not compiled again."""
    steps = on_ranks(of_several_lengths)[0]
    assert max(max(loss, gradient) for loss, gradient, _ in steps) < 1e-12
    first, second, third = (graphs for *_, graphs in steps)
    assert first < second == third


# -- transformers


def of_transformers(rank: int, folder: str) -> list[tuple[float, float]]:
    """By length, errors of the loss and of the gradients, of a model that transformers has cut."""
    import transformers

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    truth, model = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options)
        for options in ({}, {"tp_plan": "auto"})
    )
    compiled_one = compiled(model)

    def run(call: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda ids, labels: call(input_ids=ids, labels=labels).loss  # type: ignore[no-any-return]

    return [errors(model, truth, run(compiled_one), run(truth), length) for length in LENGTHS]


@pytest.mark.long
def test_a_model_that_transformers_has_cut(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).double().save_pretrained(tmp_path)
    assert max(map(max, on_ranks(of_transformers, str(tmp_path))[0])) < 1e-6
