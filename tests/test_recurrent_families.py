"""Models that carry a state, as transformers writes them: exact in any chunks, and in loops.

For each further chunk they keep the state with which it began, and rows of the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop

import streamfx
from benchmarks.live_bytes import peak_live_bytes
from streamfx.cost.memory import cost_of
from streamfx.ir.facts import known
from streamfx.runtime.associative import Associative
from streamfx.runtime.chunked_recurrences import Recurrence
from streamfx.runtime.custom_scan import Backward, Forward
from streamfx.runtime.scan import ChunkedScan
from tests.support import decoders, layouts
from tests.support.exactness import Report, assert_small, compare, errors, outcome, recorder
from tests.support.recurrent import BATCH, LENGTHS, SIZES, VOCABULARY, WIDTH, of_transformers
from tests.support.spread import only
from tests.test_associative_scans import decayed as by_pairs
from tests.test_recurrences import Mixed, Mixer, all_in_rows, operators, zeros
from tests.test_scan_operators import decayed as by_scan
from tests.test_stateful import selected

pytestmark = pytest.mark.compiled

TOLERANCE = 1e-11


def streamed_share(report: Report) -> float:
    """The share of FLOPs in loops over chunks, as `explain` counts them."""
    (recorded,) = report.recorder.compilations
    program = known(report.facts[0].program)
    cost = cost_of(program.forward, program.backward, recorded.joint_arguments[1])
    return cost.streamed_flops / cost.flops


@pytest.mark.parametrize("name", only(["recurrent_gemma"], SIZES))
def test_exact_in_any_chunks(name: str) -> None:
    layers = 2 if name == "rwkv" else 1  # which divides by how many come before the last
    ids = layouts.tokens(VOCABULARY, BATCH, LENGTHS.get(name, 11), 0)
    model, how = decoders.made(lambda: of_transformers(name, layers)), {"tolerance": TOLERANCE, "streams": None}
    report = compare(model, {"input_ids": ids, "labels": ids}, chunk_size=7, also=(1, 64), **how)  # type: ignore[arg-type]
    assert streamed_share(report) > 0.99
    if name != "xlstm":  # of two blocks, the states in front of which run whole
        found = operators(report, Recurrence, Forward, Backward)
        assert len(found) >= 2 * layers and all_in_rows(report, found) and not report.facts[0].reasons()


def turned(m: Mixed, x: Tensor) -> Tensor:
    """What a loop carries is all rows of the result, too; nothing of what it is given may lie in one memory."""
    rows, length = m.gate(x).clone(), x.shape[1]

    def turn(t: Tensor, made: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = (0.9 * state + rows.index_select(1, t.view(1)).squeeze(1)).tanh()
        return t + 1, torch.where((torch.arange(length) == t)[None, :, None], state.unsqueeze(1), made), 1.0 * state

    start = torch.zeros((), dtype=torch.int64), torch.zeros_like(x), zeros(x)
    return m.out(while_loop(lambda t, *_: t < length, turn, start)[1])


@pytest.mark.parametrize("chunk", ["auto", 4])
def test_a_loop_of_turns_runs_whole_and_what_is_around_it_streams(chunk: int | str) -> None:
    """How many turns it takes is counted on the way, and how many rows a chunk has is chosen before."""
    own, eager = (decoders.made(lambda: Mixed(turned)) for _ in range(2))
    ids, backend = layouts.tokens(VOCABULARY, BATCH, 11, 0), recorder(chunk_size=chunk, loss_chunk_size=chunk)
    truth = outcome(eager, eager, {"ids": ids, "labels": ids})
    compiled = torch.compile(own, backend=backend, fullgraph=True)  # without, AOTAutograd itself refuses it
    assert_small(errors(outcome(compiled, own, {"ids": ids, "labels": ids}), truth), TOLERANCE, "turns")
    (facts,) = backend.facts
    assert not facts.analysis_error and len(known(facts.program).loops) > 2
    assert any("while_loop" in reason for reason in facts.reasons())


# -- what is kept

FEW, MANY = 9, 15  # chunks


def grown(make: Callable[[], nn.Module], kind: Any, chunk: int, name: str = "ids") -> tuple[dict[str, float], int]:
    """Bytes more for each chunk, as predicted and as measured; and those of a layer's state."""
    found = []
    for count in (FEW, MANY):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model, ids = make(), layouts.tokens(VOCABULARY, BATCH, count * chunk, 0)
        options: dict[str, Any] = {"chunk_size": chunk, "loss_chunk_size": chunk, "bodies": "eager"}
        batch = {name: ids, "labels": ids}
        explained = streamfx.explain(model, **batch, options=options)
        targets: list[Any] = [node.target for graph in explained.call.graphs for node in graph.facts.joint.forward]
        (state,) = {target.carried for target in targets if isinstance(target, kind)}
        figures = {name: explained.summary()[f"{name}_bytes"] for name in ("peak", "saved", "baseline_peak")}
        compiled = torch.compile(model, backend="streambp", options=options)
        step: Callable[[], Any] = lambda: scalar(compiled(**batch)).backward()  # noqa: B023, E731
        step()
        model.zero_grad()
        found.append({**figures, "measured": peak_live_bytes(step)})
    return {name: (found[1][name] - few) / (MANY - FEW) for name, few in found[0].items()}, state


def scalar(made: Any) -> Tensor:
    return made if isinstance(made, Tensor) else made.loss


FORMS: dict[str, tuple[Mixer, type]] = {
    "scan": (by_scan, ChunkedScan),
    "associative_scan": (by_pairs, Associative),
    "operator": (lambda m, x: m.out(selected(m, x)[0]), Forward),
}


@pytest.mark.long
@pytest.mark.parametrize("form", [*FORMS, "transformers"])
def test_with_each_layer_the_peak_grows_by_one_state_per_chunk(form: str) -> None:
    """Beyond the rows of one residual stream, of which a longer sequence has more.

    What goes back through a convolution is given rows of one layer at a time, whichever it is.
    """
    if form == "transformers":
        two, three = (grown(partial(of_transformers, "mamba2", layers), Forward, 11, "input_ids") for layers in (2, 3))
        rows = BATCH * 11 * WIDTH * torch.float64.itemsize
    else:
        mixer, kind = FORMS[form]
        two, three = (grown(partial(Mixed, mixer, layers), kind, 4) for layers in (2, 3))
        rows = BATCH * 4 * WIDTH * torch.float32.itemsize
    more, state = {name: three[0][name] - two[0][name] for name in three[0]}, three[1]
    assert more.pop("baseline_peak") > 1.5 * (state + rows)
    if form == "transformers":
        more.pop("measured")
    assert all(state <= own <= state + rows for own in more.values()), (more, state, rows)
