"""Promise one, when batch and length change between calls, and how often that compiles anew."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.ir.joint import is_size
from streamfx.kernels.grouped_mm import GROUPED_OUTER
from streamfx.kernels.sdpa import ATTENTION, ATTENTION_BACKWARD
from streamfx.passes.lowering.accumulating_lowerings import ADDERS
from streamfx.passes.lowering.bodies import EMITTERS
from streamfx.runtime.rel_shift import RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD
from tests.support import decoders, hf, layouts
from tests.support.exactness import TOLERANCE, assert_small, check_streamed, errors, outcome, recorder
from tests.support.small import Causal, tokens
from tests.support.spread import only
from tests.support.twins import batch, compiled, same_gradients, same_step, twins


def test_other_lengths_do_not_recompile_each_time() -> None:
    own, eager = twins()
    function, backend = compiled(own)
    for length in (13, 9, 21, 6, 30, 5):
        own.zero_grad()
        eager.zero_grad()
        function(**batch(length=length)).backward()
        eager(**batch(length=length)).backward()
        same_gradients(own, eager, f"length {length}")
    assert len(backend.compilations) == 2  # one for the first length, one for all others
    check_streamed(backend.facts, True, {"causal"})


KINDS = [decoders.Plain, decoders.Triangle, decoders.HalfRope, decoders.Window]


@pytest.mark.parametrize("make", only([decoders.Window], KINDS), ids=lambda m: m.__name__)
def test_mark_dynamic(make: Callable[[], nn.Module]) -> None:
    own, eager = twins(make)
    function, backend = compiled(own)
    for length in (13, 9, 21):
        own.zero_grad()
        eager.zero_grad()
        inputs = batch(length=length)
        for tensor in inputs.values():
            torch._dynamo.mark_dynamic(tensor, 1)
        function(**inputs).backward()
        eager(**batch(length=length)).backward()
        same_gradients(own, eager, f"length {length}")
    assert len(backend.compilations) == 1
    check_streamed(backend.facts, True, None)


def test_batch_and_length_both_change() -> None:
    own, eager = twins()
    function, backend = compiled(own)
    for rows, length in ((2, 13), (3, 9), (5, 21), (4, 4), (6, 6)):
        same_step(function, own, eager, batch(rows, length))
    check_streamed(backend.facts, True, {"causal"})


def test_batch_and_length_of_ids_and_labels_both_change() -> None:
    """Torch knows of two tensors only that they have as many elements: which rows belong together follows from their sizes."""
    model = Causal().double()
    eager = copy.deepcopy(model)
    function, backend = compiled(model)
    for rows, length in ((2, 13), (3, 9), (5, 21), (1, 7)):
        same_step(function, model, eager, {"ids": tokens(rows, length), "labels": tokens(rows, length)})
    check_streamed(backend.facts, True, {"causal"})


class Fixed(Causal):
    """What the model does with ids of one length alone fixes that length of the ids, and nothing of the labels."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(ids * 1 if ids.shape[1] == 9 else ids, labels)


def test_a_length_that_is_fixed_for_ids_alone() -> None:
    model = Fixed().double()
    eager = copy.deepcopy(model)
    function, backend = compiled(model)
    for rows, length in ((2, 13), (3, 9), (5, 9)):
        same_step(function, model, eager, {"ids": tokens(rows, length), "labels": tokens(rows, length)})
    check_streamed(backend.facts, True, {"causal"})


def test_dynamic_lengths_of_a_huggingface_model() -> None:
    own = hf.made("llama")
    eager = copy.deepcopy(own)
    function, backend = compiled(own)
    for length in (13, 9, 21, 7):
        inputs = layouts.plain(layouts.tokens(hf.VOCABULARY, 2, length))
        actual, truth = outcome(function, own, inputs), outcome(eager, eager, inputs)
        assert_small(errors(actual, truth), TOLERANCE, f"length {length}")
    assert len(backend.compilations) == 2
    check_streamed(backend.facts, True, {"causal"})


class Joined(nn.Module):
    """Attention over two documents, each with positions of its own: [B, T, 8] and as much again."""

    def __init__(self, positions: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.w, self.positions = nn.Parameter(torch.randn(8, 8, dtype=torch.float64) / 3), positions

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        x, position = torch.cat((one, other), 1), self.positions(torch.arange(one.shape[1]))
        scores = (x @ self.w @ x.transpose(1, 2)).masked_fill(position > position[:, None], -torch.inf)
        return (torch.softmax(scores, -1) @ x).square().sum()


JOINED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "twice": lambda p: torch.cat((p, p)),
    "and a copy": lambda p: torch.cat((p, p.clone())),
    "around others": lambda p: torch.cat((p, p[:3] * 5, p))[: 2 * len(p)],
    "continued": lambda p: torch.cat((p, p + len(p))),
}


@pytest.mark.parametrize("name", JOINED)
def test_positions_that_are_joined(name: str) -> None:
    model = Joined(JOINED[name])
    call = torch.compile(model, backend="streambp", options={"chunk_size": 8}, dynamic=True)
    for length in (13, 21):
        inputs = [torch.randn(2, length, 8, dtype=torch.float64) for _ in range(2)]
        found, truth = (torch.autograd.grad(run(*inputs), model.w)[0] for run in (call, model))
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


class Buffered(nn.Module):
    """Attention with a mask in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8, dtype=torch.float64) / 3)
        self.register_buffer("mask", torch.ones(40, 40).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        hidden = self.get_buffer("mask")[:length, :length] == 0
        scores = (x @ self.w @ x.transpose(1, 2)).masked_fill(hidden, -torch.inf)
        return (torch.softmax(scores, -1) @ x).square().sum()


def test_a_mask_that_changes_between_calls_of_other_lengths() -> None:
    """What is compiled once it has changed is for all lengths, too."""
    model = Buffered()
    call = torch.compile(model, backend="streambp", options={"chunk_size": 8}, dynamic=True)
    for length in (13, 21, 14, 30):
        x = torch.randn(2, length, 8, dtype=torch.float64)
        found, truth = (torch.autograd.grad(run(x), model.w)[0] for run in (call, model))
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)
        model.get_buffer("mask")[3, 7] = 1


class KeysBesideHeads(nn.Module):
    """One key fewer than rows, in one dimension with heads: how many a chunk's rows see is part of a larger size."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.keys = nn.Linear(decoders.WIDTH, decoders.WIDTH), nn.Linear(decoders.WIDTH, 2 * decoders.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, heads, keys = *x.shape[:2], decoders.HEADS, x.shape[1] - 1
        query = self.query(x).unflatten(-1, (heads, -1)).transpose(1, 2)
        key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in self.keys(x[:, 1:]).chunk(2, -1))
        flat = (query @ key.mT).permute(0, 2, 3, 1).reshape(batch, rows, keys * heads)
        scores = (1.5 * flat).tanh().reshape(batch, rows, keys, heads).permute(0, 3, 1, 2)
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(-2)


def test_sizes_that_follow_from_what_a_chunk_sees() -> None:
    own, eager = twins(type("Beside", (decoders.Decoder,), {"attention": KeysBesideHeads}))
    function, backend = compiled(own)
    for length in (13, 9, 21):
        same_step(function, own, eager, batch(length=length))
    check_streamed(backend.facts, True, None)


aten = torch.ops.aten
Program = Callable[["GivenNumber", Tensor, int], Tensor]


class GivenNumber(nn.Module):
    """A few operators on a number that comes with the input, between two linear layers, and attention."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program, self.up, self.down = program, nn.Linear(8, 8), nn.Linear(8, 8)
        self.table = nn.Parameter(torch.randn(11, 8))

    def forward(self, x: Tensor, number: int) -> Tensor:
        made: Tensor = self.down(attended(self.program(self, self.up(x), number))).sin().square().mean()
        return made


def attended(x: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
    q = x[:, None]
    return F.scaled_dot_product_attention(q, q, q, mask, is_causal=mask is None, **more)[:, 0]


def between_triangles(m: GivenNumber, x: Tensor, n: int) -> Tensor:
    ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    return attended(x, ones.tril() & ones.triu(-n)) + attended(x, ones.tril(n) & ones.triu(-(x.shape[1] // 2)))


# operators that are written for a chunk, or added up, by more than a copy, on a number that follows from sizes or was given
GIVEN: dict[str, tuple[Program, tuple[Any, ...]]] = {
    "masks": (between_triangles, (aten.triu.default,)),
    "scores": (lambda m, x, n: ((x @ x.mT).tril(n - 5).triu(-n)) @ x, (aten.tril.default, aten.triu.default)),
    "padding with a number": (lambda m, x, n: F.pad(x, (0, 0, 1, 0), value=n)[:, :-1], ()),
    "padding": (lambda m, x, n: F.pad(x, (0, 0, n, 0))[:, :-n] + F.pad(x, (0, 0, -n, n)), (aten.constant_pad_nd.default,)),
    "slices": (lambda m, x, n: x * x[:, n:].sum(1, True), (aten.slice.Tensor, aten.slice_backward.default)),
    "a row": (lambda m, x, n: x * x[:, n, None], ()),
    "copies": (lambda m, x, n: x + m.table[0].repeat(n, 1)[1], (aten.repeat.default,)),
    "a norm": (
        lambda m, x, n: F.layer_norm(x[..., :n], (n,)).sin().sum(-1, True) + x,
        (aten.native_layer_norm_backward.default,),
    ),
    "a row of a table": (
        lambda m, x, n: x + F.embedding(torch.arange(x.shape[1])[None] % 11, m.table, padding_idx=n),
        (aten.embedding_dense_backward.default,),
    ),
    "a scale": (lambda m, x, n: attended(x, scale=1 / n) + attended(x, scale=x.shape[1] ** -0.5), ()),
    "between loops": (lambda m, x, n: x / x.std(1, keepdim=True) * (1.0 * n) ** -torch.arange(8), ()),
}

OTHERS = {
    *(RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD, GROUPED_OUTER),  # whose numbers are sizes: other tests make them dynamic
    *(aten.convolution.default, aten.convolution_backward.default),  # refused by their rule
    *(ATTENTION, ATTENTION_BACKWARD, aten.select.int, aten.select_backward.default),  # of which Dynamo makes constants
}


@pytest.mark.parametrize("name", GIVEN)
def test_numbers_that_follow_from_sizes_or_are_given(name: str) -> None:
    """A chunk's operator takes them as the body has them: nodes of the joint graph are none of the body."""
    program, operators = GIVEN[name]
    torch.manual_seed(0)
    model, backend = GivenNumber(program).double(), recorder(bodies="eager", chunk_size=5)
    call = torch.compile(model, backend=backend, dynamic=True)
    for length, number in ((13, 5), (21, 7)):
        x = torch.randn(2, length, 8, dtype=torch.float64)
        found, truth = (
            torch.autograd.grad(run(x, number), [*model.parameters()], allow_unused=True, materialize_grads=True)
            for run in (call, model)
        )
        torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)
    check_streamed(backend.facts, None, None)
    facts = backend.facts[-1]
    assert facts.program is not None
    for target in operators:
        calls = facts.joint.graph.find_nodes(op="call_function", target=target)
        assert any(is_size(argument) for node in calls for argument in node.all_input_nodes), target


def test_each_operator_that_takes_numbers_is_given_some() -> None:
    """Those that have a rule of their own for chunks, or for sums over chunks."""
    schemas = {target: str(target._schema) for target in (*EMITTERS, *ADDERS) if isinstance(target, torch._ops.OpOverload)}
    taking = {target for target, schema in schemas.items() if re.search(r"SymInt|Scalar |float\?", schema)}
    assert taking - OTHERS == {target for _, operators in GIVEN.values() for target in operators}
