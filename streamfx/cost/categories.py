"""Categories of the bytes of a loop. A *term* of a peak is a category with its bytes."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from streamfx.ir.facts import Facts
from streamfx.ir.program import BufferOutput, BufferPart, ChunkSlice, ConcatOutput, LoopSpec
from streamfx.ir.span import Span
from streamfx.runtime.loop import Loop

PARAMETERS, INPUTS, OPTIMIZER = "parameters", "inputs", "optimizer"
WEIGHTS = "whole weights"
GRADIENTS = "gradients"
STAGE_INPUTS = "stage inputs"
STREAM_GRADIENT = "gradient of the stream"
KEYS = "keys and values"
KEY_GRADIENTS = "gradients of keys and values"
CHUNK, LOSS = "chunk work", "loss chunk work"
STATES = "states"
EXCHANGED = "exchanged rows"
ATTENTION = "whole attention"
BETWEEN_GRAPHS = "kept between graphs"
OTHER = "other"


@dataclass(frozen=True)
class LoopTerms:
    """The categories of a loop's buffers, of its concatenated results, and of all other values of its chunks."""

    buffers: tuple[str, ...]
    concatenated: tuple[str, ...]
    chunk: str


def loss_values(facts: Facts) -> frozenset[str]:
    """Return the names of the values of a loss stage that computes its gradient together with the loss."""
    loss_stages = [stage for stage in facts.found_stages or () if stage.gradient_in_forward]
    return frozenset(node.name for stage in loss_stages for node in (*stage.forward, *stage.backward))


def terms_of(
    module: fx.GraphModule, is_backward: bool, between: Mapping[str, str], loss: frozenset[str] = frozenset()
) -> dict[str, LoopTerms]:
    """Return the categories of each loop of a host program, by the loop's name.

    `between` has the categories of the nodes between loops, `loss` the names of the values of the loss stage.
    """
    terms: dict[str, LoopTerms] = {}
    for call in module.graph.find_nodes(op="call_module"):
        loop = module.get_submodule(call.target)
        if isinstance(loop, Loop):
            is_loss = not is_backward and bool(loop.spec.labels) and loop.spec.labels[0] in loss
            is_gradient = (is_backward and loop.spec.reverse) or is_loss
            concatenated = _concat_terms(loop.spec, call, module, STREAM_GRADIENT if is_gradient else STAGE_INPUTS, between)
            terms[call.target] = LoopTerms(_buffer_terms(loop.spec), concatenated, LOSS if is_loss else CHUNK)
    return terms


def _buffer_terms(spec: LoopSpec) -> tuple[str, ...]:
    """Return the category of each buffer: gradients or states if read as a whole, else keys, or their gradients if a sum."""
    read_whole = {feed.buffer for feed in spec.feeds if isinstance(feed, BufferPart) and not feed.selections}
    returned = {output.buffer for output in spec.yields if isinstance(output, BufferOutput)}
    return tuple(
        (GRADIENTS if i in returned and buffer.is_sum else STATES)
        if i in read_whole
        else KEY_GRADIENTS
        if buffer.is_sum
        else KEYS
        for i, buffer in enumerate(spec.buffers)
    )


def _concat_terms(
    spec: LoopSpec, call: fx.Node, module: fx.GraphModule, default_term: str, between: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the category of each concatenated result of a loop: keys, exchanged rows, or else `default_term`."""
    results = {user.args[1]: user for user in call.users if user.target is operator.getitem}
    terms = []
    for i, output in enumerate(spec.yields):
        if isinstance(output, ConcatOutput):
            users = list(results[i].users) if i in results else []
            is_exchanged = any(between.get(user.name) == EXCHANGED for user in users)
            is_read_as_keys = any(_reads_keys(user, results[i], module) for user in users)
            terms.append(KEYS if is_read_as_keys else EXCHANGED if is_exchanged else default_term)
    return tuple(terms)


def _reads_keys(user: fx.Node, result: fx.Node, module: fx.GraphModule) -> bool:
    """Return whether a loop reads the key positions of its chunks from `result`."""
    if user.op != "call_module" or not isinstance(loop := module.get_submodule(user.target), Loop):  # type: ignore[arg-type]
        return False
    sources = {i for i, argument in enumerate(user.args[len(loop.spec.symbols) :]) if argument is result}
    return any(
        source in sources and isinstance(feed, ChunkSlice) and any(isinstance(selector, Span) for _, selector in feed.selections)
        for feed, source in zip(loop.spec.feeds, loop.spec.sources, strict=True)
    )
