"""Families of models that carry a state, in each of the ways that one is written: exact in any chunks, and in loops.

For each further chunk they keep the state with which it began, and rows of the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.while_loop import while_loop

import streamfx
from benchmarks.live_bytes import peak_live_bytes
from streamfx.cost.memory import cost_of
from streamfx.ir.facts import known
from streamfx.runtime.associative import Associative, AssociativeBackward
from streamfx.runtime.recurrences import Recurrence
from streamfx.runtime.scanned import Scanned
from streamfx.runtime.stateful import Backward, Forward
from tests.support import decoders, layouts
from tests.support.exactness import Report, assert_small, compare, errors, outcome, recorder
from tests.support.recurrent import BATCH, FAMILIES, WIDTH, Values
from tests.support.scans import scan
from tests.support.spread import only
from tests.support.stateful.families import OPERATORS
from tests.test_recurrences import all_in_rows, operators

VOCABULARY, TOLERANCE = 23, 1e-11

Written = Callable[[str, Values, Values, Values], tuple[Tensor, Values]]


# -- written by hand: with PyTorch's `scan`, with its `associative_scan`, with an operator whose state is declared


def scanned(name: str, rows: Values, weights: Values, states: Values) -> tuple[Tensor, Values]:
    """PyTorch refuses a step one of whose results autograd keeps for another: what is carried on is made anew."""

    def step(states: Values, rows: Values) -> tuple[Values, Tensor]:
        left, made = FAMILIES[name].step(states, rows, weights)
        return tuple(1.0 * state for state in left), 1.0 * made

    last, made = scan(step, states, rows, dim=1)
    return made, last


def combined(name: str, rows: Values, weights: Values, states: Values) -> tuple[Tensor, Values]:
    family = FAMILIES[name]
    stretches: Any = associative_scan(family.join, family.stretch(rows, weights), 1, combine_mode="generic")
    after = family.after(stretches, tuple(state.unsqueeze(1) for state in states))
    pairs = zip(states, after, strict=True)
    read = tuple(torch.cat([first.unsqueeze(1), item[:, :-1]], 1) for first, item in pairs) if family.before else after
    return family.read(rows, weights, read), tuple(item[:, -1] for item in after)


def called(name: str, rows: Values, weights: Values, states: Values) -> tuple[Tensor, Values]:
    made, *last = OPERATORS[name](*rows, *weights, *states)
    return made, tuple(last)


def turned(name: str, rows: Values, weights: Values, states: Values) -> tuple[Tensor, Values]:
    """What a loop carries is all rows of the result, too; nothing of what it is given may lie in one memory."""
    family, length = FAMILIES[name], rows[0].shape[1]
    rows, weights = tuple(item.clone() for item in rows), tuple(item.clone() for item in weights)
    like = family.step(states, tuple(item[:, 0] for item in rows), weights)[1]

    def turn(t: Tensor, made: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        own = tuple(item.index_select(1, t.view(1)).squeeze(1) for item in rows)
        left, y = family.step(states, own, weights)
        made = torch.where((torch.arange(length) == t)[None, :, None], y.unsqueeze(1), made)
        return (t + 1, made, *(1.0 * state for state in left))

    start = torch.zeros((), dtype=torch.int64), like.new_zeros(len(like), length, like.shape[1]), *states
    _, made, *last = while_loop(lambda t, *_: t < length, turn, start)
    return made, tuple(last)


class Layer(nn.Module):
    """A recurrence that begins with a learned state, and an MLP."""

    def __init__(self, name: str, form: Written) -> None:
        super().__init__()
        self.name, self.form, self.family = name, form, FAMILIES[name]
        self.shapes = [torch.Size(shape) for shape in self.family.rows.values()]
        self.rows = nn.Linear(WIDTH, sum(shape.numel() for shape in self.shapes))
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.weights = nn.ParameterList(torch.randn(shape) for shape in self.family.weights.values())
        self.first = nn.ParameterList(torch.rand(shape) for shape in self.family.states.values())

    def forward(self, x: Tensor) -> tuple[Tensor, Values]:
        parts = self.rows(F.rms_norm(x, (WIDTH,))).split([shape.numel() for shape in self.shapes], -1)
        values = tuple(part.unflatten(-1, shape) for part, shape in zip(parts, self.shapes, strict=True))
        states = tuple(first.expand(x.shape[0], *first.shape).clone() for first in self.first)
        made, last = self.form(self.name, *self.family.made(values, tuple(self.weights)), states)
        x = x + self.out(made)
        return x + self.down(F.silu(self.up(F.rms_norm(x, (WIDTH,))))), last


class Decoder(nn.Module):
    """The loss asks for the states behind the last row, too."""

    def __init__(self, name: str, form: Written, layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(Layer(name, form) for _ in range(layers))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, beside = self.embed(input_ids), []
        for layer in self.layers:
            x, last = layer(x)
            beside += [state.square().mean() for state in last]
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return loss + 0.1 * torch.stack(beside).sum()


# -- as transformers writes them

HEADS_OF = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 12}
GATED = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
SIZES: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4, "time_step_rank": 2, "expand": 1},
    "mamba2": {"num_heads": 2, "head_dim": 8, "expand": 2, "state_size": 4, "n_groups": 1, "chunk_size": 11},
    "xlstm": {"num_heads": 2, "mode": "train", "chunk_size": 11},
    "rwkv": {"attention_hidden_size": 8, "intermediate_size": 12, "context_length": 128},
    "qwen3_next": {**HEADS_OF, **GATED, "mlp_only_layers": [0, 1], "layer_types": ["linear_attention"]},
    "recurrent_gemma": {**HEADS_OF, "lru_width": 8, "attention_window_size": 16},
}
LENGTHS = {"qwen3_next": 130, "mamba2": 22, "xlstm": 22}  # blocks have 64 rows, or two are to be filled


def of_transformers(name: str, layers: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": layers, "use_cache": False, **SIZES[name]}
    config = transformers.AutoConfig.for_model(name, **sizes | ({"num_blocks": layers} if name == "xlstm" else {}))
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # else a warning in the loss may break the graph
    return model


# -- exact, and in loops

WRITTEN: dict[str, Written] = {"scan": scanned, "associative_scan": combined, "operator": called}
KINDS: dict[str, tuple[type, ...]] = {
    "scan": (Scanned,),
    "associative_scan": (Associative, AssociativeBackward),
    "operator": (Forward, Backward),
    "transformers": (Recurrence, Forward, Backward),
}


def streamed_share(report: Report) -> float:
    """The share of FLOPs in loops over chunks, as `explain` counts them."""
    (recorded,) = report.recorder.compilations
    program = known(report.facts[0].program)
    cost = cost_of(program.forward, program.backward, recorded.joint_arguments[1])
    return cost.streamed_flops / cost.flops


EACH = [*((family, form) for family in FAMILIES for form in WRITTEN), *((name, "transformers") for name in SIZES)]


@pytest.mark.parametrize(("family", "form"), only([("mamba", "operator")], EACH))
def test_exact_in_any_chunks(family: str, form: str) -> None:
    length, layers = 11, 2 if (family, form) == ("rwkv", "transformers") else 1  # which divides by how many come before the last
    if form == "transformers":
        length, model = LENGTHS.get(family, 11), decoders.made(lambda: of_transformers(family, layers))
    else:
        model = decoders.made(lambda: Decoder(family, WRITTEN[form], layers))
    ids = layouts.tokens(VOCABULARY, BATCH, length, 0)
    report = compare(model, {"input_ids": ids, "labels": ids}, chunk_size=7, also=(1, 64), tolerance=TOLERANCE, streams=None)
    assert streamed_share(report) > 0.99
    if (family, form) != ("xlstm", "transformers"):  # of two blocks, the states in front of which run whole
        found = operators(report, *KINDS[form])
        assert len(found) >= 2 * layers and all_in_rows(report, found) and not report.facts[0].reasons()


@pytest.mark.parametrize("chunk", ["auto", 4])
def test_a_loop_of_turns_runs_whole_and_what_is_around_it_streams(chunk: int | str) -> None:
    """How many turns it takes is counted on the way, and how many rows a chunk has is chosen before."""
    own, eager = (decoders.made(lambda: Decoder("mamba", turned, 1)) for _ in range(2))
    ids, backend = layouts.tokens(VOCABULARY, BATCH, 11, 0), recorder(chunk_size=chunk, loss_chunk_size=chunk)
    truth = outcome(eager, eager, {"input_ids": ids, "labels": ids})
    compiled = torch.compile(own, backend=backend, fullgraph=True)  # without, AOTAutograd itself refuses it
    assert_small(errors(outcome(compiled, own, {"input_ids": ids, "labels": ids}), truth), TOLERANCE, "turns")
    (facts,) = backend.facts
    assert not facts.failed and len(known(facts.program).loops) > 2
    assert any("while_loop" in reason for reason in facts.reasons())


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_the_ways_are_one_function(family: str) -> None:
    """In eager: what is made, the states behind the last row, and gradients of everything."""
    generator = torch.Generator().manual_seed(0)
    own, made = FAMILIES[family], {}

    def draw(shapes: dict[str, tuple[int, ...]], *front: int) -> Values:
        sizes = ((*front, *shape) for shape in shapes.values())
        return tuple(torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes)

    given = draw(own.rows, BATCH, 6), draw(own.weights), draw(own.states, BATCH)
    for form, written in WRITTEN.items():
        y, last = written(family, *own.made(*given[:2]), tuple(state.exp() for state in given[2]))
        total = (y * y.detach().cos()).sum() + sum((state * state.detach().sin()).sum() for state in last)
        made[form] = (y, *last, *torch.autograd.grad(total, [item for part in given for item in part]))
    for form in WRITTEN:
        torch.testing.assert_close(made[form], made["scan"], rtol=1e-11, atol=1e-12)


# -- what is kept

FEW, MANY = 9, 15  # chunks


def grown(make: Callable[[], nn.Module], form: str, chunk: int) -> tuple[dict[str, float], int]:
    """Bytes more for each chunk, as predicted and as measured; and those of a layer's state."""
    found = []
    for count in (FEW, MANY):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model, batch = make(), layouts.plain(layouts.tokens(VOCABULARY, BATCH, count * chunk, 0))
        options: dict[str, Any] = {"chunk_size": chunk, "loss_chunk_size": chunk, "bodies": "eager"}
        explained = streamfx.explain(model, **batch, options=options)
        nodes = [node for graph in explained.call.graphs for node in graph.facts.joint.forward]
        (state,) = {node.target.carried for node in nodes if isinstance(node.target, KINDS[form])}
        figures = {name: explained.summary()[f"{name}_bytes"] for name in ("peak", "saved", "baseline_peak")}
        compiled = torch.compile(model, backend="streambp", options=options)
        compiled(**batch).backward()
        model.zero_grad()
        found.append({**figures, "measured": peak_live_bytes(lambda: compiled(**batch).backward())})
    return {name: (found[1][name] - few) / (MANY - FEW) for name, few in found[0].items()}, state


@pytest.mark.long
@pytest.mark.parametrize("form", [*WRITTEN, "transformers"])
def test_with_each_layer_the_peak_grows_by_one_state_per_chunk(form: str) -> None:
    """Beyond the rows of one residual stream, of which a longer sequence has more.

    What goes back through a convolution is given rows of one layer at a time, whichever it is.
    """
    chunk, size = (11, 8) if form == "transformers" else (4, 4)
    makes = (
        (lambda layers=layers: of_transformers("mamba2", layers) if size == 8 else Decoder("mamba", WRITTEN[form], layers))
        for layers in (2, 3)
    )
    (two, _), (three, state) = (grown(make, form, chunk) for make in makes)
    more, rows = {name: three[name] - two[name] for name in three}, BATCH * chunk * WIDTH * size
    assert more.pop("baseline_peak") > 1.5 * (state + rows)
    if form == "transformers":
        more.pop("measured")
    assert all(state <= own <= state + rows for own in more.values()), (more, state, rows)
