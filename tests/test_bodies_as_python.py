"""Bodies of loops that are printed run: what they give is what the loops compute."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx.runtime.loop import Loop
from streamfx.tools.report.loop_bodies import python_of
from tests.support.small import EXAMPLES, Mixing, tokens
from tests.test_explain import rows
from tests.test_timeline import Small

IDS = tokens(2, 12)


def cloned(values: Sequence[Any]) -> list[Any]:
    """Copies that share memory as the values do: a chunk's rows of a buffer are among those that are seen."""
    return copy.deepcopy([value.detach() if isinstance(value, Tensor) else value for value in values])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def check_printed(monkeypatch: pytest.MonkeyPatch, model: nn.Module, *args: Any, **options: Any) -> list[str]:
    """Train a step in which each chunk is computed by the printed body, too. Names of the loops that ran."""
    seen: list[str] = []

    def runner(loop: Loop, bounds: Any) -> Callable[..., Any]:
        namespace: dict[str, Any] = {}
        exec(python_of({loop.spec.name: loop.spec.body}), namespace)
        body = loop.spec.body
        held = {name: getattr(body, name) for name in _arguments(namespace[loop.spec.name])}
        printed = namespace[loop.spec.name](**held)
        seen.append(loop.spec.name)

        def run(*feeds: Any) -> Any:
            copies = cloned(feeds)
            expected, found = body.forward(*feeds), printed(*copies)
            assert same(found, expected)
            assert same(copies, list(feeds))  # sums and buffers, too
            return expected

        return run

    monkeypatch.setattr(Loop, "runner", runner)
    torch._dynamo.reset()
    results = torch.compile(model, backend="streambp", options={"bodies": "eager", **options})(*args)
    torch.stack([value.sum() for value in (results if isinstance(results, tuple) else (results,))]).sum().backward()
    torch._dynamo.reset()
    return seen


def _arguments(kind: type) -> list[str]:
    code = getattr(kind.__init__, "__code__", None)  # type: ignore[misc]
    return [] if kind.__init__ is nn.Module.__init__ or code is None else list(code.co_varnames[1 : code.co_argcount])  # type: ignore[misc]


@pytest.mark.parametrize("example", EXAMPLES)
def test_printed_bodies_compute_what_loops_do(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, given = EXAMPLES[example].model(), EXAMPLES[example].arguments()
    arguments = [value.requires_grad_() if value.is_floating_point() else value for value in given]
    names = check_printed(monkeypatch, model, *arguments, chunk_size=3, loss_chunk_size=2)
    assert any("forward" in name for name in names)
    assert any("backward" in name for name in names)


def test_bodies_of_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    explanation = streamfx.explain(Small(3), IDS, IDS, options={"chunk_size": 4})
    text = explanation.print_readable("layers.1")
    assert capsys.readouterr().out == text + "\n"
    assert text.count("class layers_1_") == 3
    assert "layers_0" not in text
    assert "test_timeline.py" in text  # where each line comes from
    compile(text, "printed", "exec")
    assert explanation.print_readable("layers.1.up", print_output=False) == text
    everything = explanation.print_readable(print_output=False)
    assert everything.count("class ") == len(explanation.graphs) == 10
    assert all(f"class {name}(" in everything for name in explanation.graphs)


def test_unknown_modules_are_refused_with_names_that_are_near() -> None:
    explanation = streamfx.explain(Small(3), IDS, IDS, options={"chunk_size": 4})
    with pytest.raises(streamfx.ReportError, match=r"(?s)'layer\.1'.*no operator that streams.*'layers\.1'"):
        explanation.print_readable("layer.1")
    with pytest.raises(streamfx.ReportError, match="for example"):
        explanation.print_readable("zzz")
    with pytest.raises(streamfx.ReportError):
        explanation.print_readable("")
    with pytest.raises(streamfx.ReportError, match="no modules in loops"):
        streamfx.explain(lambda x: x.sort(0).values * 2, torch.randn(4, requires_grad=True)).print_readable("up")


def test_several_graphs() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixing = Mixing()

        def forward(self, x: Tensor) -> Tensor:
            first = self.mixing(x)
            torch._dynamo.graph_break()
            return first + self.mixing(2 * x)

    explanation = streamfx.explain(Twice(), rows(12), options={"chunk_size": 4})
    programs = [graph.facts.program for graph in explanation.call.graphs]
    assert len(explanation.graphs) == sum(len(program.loops) for program in programs if program is not None) > len(programs) > 1
    compile(explanation.print_readable(print_output=False), "printed", "exec")
