"""Release gradients stage by stage, by a chain of autograd nodes before a compiled function.

AOTAutograd's backward graph is a single autograd node, and no accumulator runs before it has returned. So the inputs
that get gradients first pass through small identity nodes, one per segment of the backward graph
(`ir/release_plan.py`):

    weights of layer 0 -> Identity 1 ------------.
                             | a token            > compiled function -> loss
    weights of layer 1 -> Identity 0 ------------'

In the backward pass, the compiled function's node does not run the backward graph for these inputs and returns no
gradients for them. Then Identity 0 runs the first segment and returns its gradients; the token orders Identity 1
after it. Autograd runs accumulators before any other node that is ready, so hooks on parameters, reducers and
optimizers in the backward pass run between two segments. Gradients are identified by their index among the results of the
backward graph. A gradient that an identity returns is *chained*, and so is a call whose inputs pass through identities.

# NOTE [Which gradients are released early]
The compiled function's node inspects its own edges: it defers a gradient only if the edge leads to an identity for
exactly that input. It computes all other gradients before it returns. A run (`_Run`) belongs to one call and one
backward pass: autograd owns it until that pass ends, normally or with an error. If the edges are not as expected, the
node returns all gradients at once, and the identities return the gradients that autograd passes to them.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from streamfx.ir.joint import is_tensor, outputs_of
from streamfx.ir.release_plan import ReleaseSegment, Saved, Sources
from streamfx.kernels.mask_programs import use_mask_cache
from streamfx.runtime.expanded_segments import SegmentGenerator, generate_segments
from streamfx.runtime.outer import HostProgramRunner, code_call_of, mask_cache_of
from streamfx.runtime.restride import resolve_conj_and_neg
from streamfx.runtime.step_bodies import StepBodies, use_step
from streamfx.torch_private import is_sharded, rewrap
from streamfx.torch_private.autograd import (
    after_this_backward,
    are_gradients_awaited,
    autocast_is_on,
    backward_pass,
    current_autograd_node,
    is_transformed,
    no_autocast,
)

REQUESTED_TWICE = (
    "gradients were requested twice in one backward pass, or in another backward pass than the one that started to compute them"
)
DOUBLE_BACKWARD = "torch.compile with aot_autograd does not currently support double backward"


@dataclass
class GradientReleaseChain:
    """State that a compiled function shares with its backward graph: which gradients identities may return, and when.

    A call is *chained* if its inputs pass through identities. `always`: chain every call, not only those whose gradients
    hooks or optimizers wait for. `released`: the gradients that each segment releases, as indices into the
    results of the backward graph; empty if none is released early. `sources`: the inputs of these gradients. `saved`: for
    each input of the backward graph, the index of the gradient of the input in whose memory it is.
    `unchained`: gradients whose inputs are not chained. `is_used`: a call of the function was chained.
    """

    always: bool
    released: tuple[tuple[int, ...], ...] = ()
    sources: Sources = field(default_factory=dict)
    saved: Saved = ()
    unchained: frozenset[int] = frozenset()
    is_used: bool = False

    def exclude_inputs(self, primals: Sequence[int] | None) -> None:
        """Exclude inputs from chaining, so that their gradients are returned at once.

        `primals`: their indices in AOTAutograd's graph. All inputs are excluded if it is None, or if it is nonempty and
        inputs are sharded.
        """
        if primals is None or (primals and any(source.part is not None for source in self.sources.values())):
            self.released = ()
        else:
            self.unchained |= {index for index, source in self.sources.items() if source.primal_index in primals}


class _StagewiseCall:
    """One chained call of the compiled function, shared by its identities and its backward.

    `input_indices` are the indices of the inputs that are tensors; `runs` are its backward graphs that are in progress.
    """

    def __init__(self, input_indices: Sequence[int]) -> None:
        """Start without runs; a backward pass adds its run."""
        self.input_indices = input_indices
        self.runs: WeakValueDictionary[int, _Run] = WeakValueDictionary()  # keyed by backward pass


@dataclass(frozen=True)
class StagewiseFunction:
    """Calls a compiled function; its inputs pass through a chain of identities if hooks or optimizers wait for gradients."""

    compiled: Callable[..., Any]
    chain: GradientReleaseChain

    def __call__(self, *arguments: Any) -> Any:
        """Call the compiled function, with its inputs passed through identities if the call is chained."""
        if not self.chain.released or not torch.is_grad_enabled() or not (self.chain.always or self._is_awaited(arguments)):
            return self.compiled(*arguments)
        return self.compiled(*self._chained(arguments))

    def _is_awaited(self, arguments: Sequence[Any]) -> bool:
        """Return whether hooks or optimizers wait for the gradients of inputs that the chain releases early."""
        return are_gradients_awaited(
            [arguments[self.chain.sources[index].input_index] for segment in self.chain.released for index in segment]
        )

    def _chained(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """Pass the inputs of early gradients through one `Identity` per segment, last segment first; return the new inputs.

        The token of an identity is an input of the next one, so in backward the identity of segment 0 runs first. Under
        transforms such as `torch.func.grad` return the inputs unchanged.
        """
        if is_transformed():
            return arguments
        values, token = list(arguments), None
        call = _StagewiseCall([input_index for input_index, value in enumerate(values) if isinstance(value, Tensor)])
        for segment, indices in reversed(list(enumerate(self.chain.released))):
            input_of = {index: self.chain.sources[index].input_index for index in indices if index not in self.chain.unchained}
            chained_gradients = [index for index, input_index in input_of.items() if _may_be_chained(values[input_index])]
            if chained_gradients:
                token, *identities = Identity.apply(
                    call, segment, chained_gradients, token, *(values[input_of[index]] for index in chained_gradients)
                )
                for index, value in zip(chained_gradients, identities, strict=True):
                    values[input_of[index]] = value
        self.chain.is_used = True
        return values


def _may_be_chained(value: Any) -> bool:
    """Return whether a value is a plain or sharded tensor that requires a gradient."""
    return (type(value) in (Tensor, nn.Parameter) or is_sharded(value)) and value.requires_grad


class _Run:
    """One run of a backward graph, paused between two segments."""

    def __init__(self, segments: SegmentGenerator, arguments: list[Any], step: StepBodies | None) -> None:
        """Begin a run of the generated segments on the backward graph's inputs, and run its code before the first segment.

        `step` is the step to which the run belongs.
        """
        self.results: dict[int, Any] = {}  # gradients that segments have computed and no caller has taken, by index
        self._mask_cache, self._step = mask_cache_of(arguments), step
        self._remaining = segments(arguments, self.results)  # the paused generator
        self._autocast, self._context = autocast_is_on(), contextvars.copy_context()
        self._num_finished = -1  # segments; -1 until the code before the first one has run
        self._advance()

    def run_through(self, segment: int) -> None:
        """Run the segments that have not run yet, up to and including this segment index; -1: run no segment."""
        while self._num_finished <= segment:
            self._context.run(self._advance)

    def take_gradients(self, segment: int, indices: Sequence[int]) -> list[Tensor | None]:
        """Run through a segment, and return its gradients with these indices, dropping the run's references to them.

        None if a gradient was returned before.
        """
        self.run_through(segment)
        return [self.results.pop(index, None) for index in indices]

    def finish(self) -> None:
        """Release the values that the run still holds, at the end of the backward pass, even if segments never ran."""
        self._remaining.close()
        self.results.clear()

    def _advance(self) -> None:
        """Run the next segment, in the context and with the autocast state of the compiled function's node."""
        autocast = nullcontext() if self._autocast else no_autocast()
        with torch.no_grad(), use_mask_cache(self._mask_cache), use_step(self._step), autocast:
            next(self._remaining)
        self._num_finished += 1


class Identity(torch.autograd.Function):
    """Passes values through, and returns their gradients once a segment of the backward graph has computed them."""

    @staticmethod
    def forward(
        ctx: Any, call: _StagewiseCall, segment: int, gradient_indices: list[int], token: Tensor | None, *values: Tensor
    ) -> Any:
        """Return a token, which orders the identities, and then the values; save the arguments for `backward`.

        `call`: the call of the compiled function. `segment`: the index of the segment. `gradient_indices`: the gradient of each
        of `values`. `token`: the token of the identity for the segment after this one, or None.
        """
        ctx.set_materialize_grads(False)
        ctx.call, ctx.segment, ctx.gradient_indices = call, segment, gradient_indices
        return torch.empty(0, dtype=values[0].dtype, device=values[0].device), *(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, _: Any, *autograd_gradients: Tensor | None) -> Any:
        """Run the segment, unless it has run; return the gradients of the values, plus those that autograd passes.

        If the call has no run in this backward pass, the compiled function's node has returned all gradients to autograd, and
        they are passed on.
        """
        run = ctx.call.runs.get(backward_pass())
        gradients: Sequence[Tensor | None] = autograd_gradients
        if run is not None:
            gradients = [
                _combined(*pair)
                for pair in zip(run.take_gradients(ctx.segment, ctx.gradient_indices), autograd_gradients, strict=True)
            ]
            if torch.is_grad_enabled():
                gradients = _NotTwiceDifferentiable.apply(torch.empty(0, requires_grad=True), *gradients)
        elif all(gradient is None for gradient in autograd_gradients):
            raise RuntimeError(REQUESTED_TWICE)
        return None, None, None, None, *gradients


def _combined(computed: Tensor | None, from_autograd: Tensor | None) -> Tensor | None:
    """Return the sum of the gradient that a segment computed and the gradient that autograd passes; either may be None.

    For a sharded input, autograd's is a placeholder with the layout of the shards.
    """
    if computed is None or from_autograd is None:
        return computed if from_autograd is None else from_autograd
    total: Tensor = rewrap(from_autograd, lambda _: computed) if is_sharded(from_autograd) else computed + from_autograd
    return total


class _NotTwiceDifferentiable(torch.autograd.Function):
    """Passes gradients through, but raises an error if they are differentiated (`create_graph=True`)."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, *gradients: Tensor | None) -> Any:
        return tuple(None if gradient is None else gradient.detach() for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(DOUBLE_BACKWARD)


class StagewiseRunner:
    """A boxed callable for a backward graph: for chained calls it pauses after each segment, whose gradients are complete.

    Boxed: it takes one list of inputs, which it empties.
    """

    def __init__(self, full_runner: HostProgramRunner, segments: Sequence[ReleaseSegment], chain: GradientReleaseChain) -> None:
        """Wrap the runner of the full backward graph, with its segments."""
        self.full_runner, self.release_segments, self.chain = full_runner, segments, chain
        self._generated: SegmentGenerator | None = None
        self._boxed_call = True

    def __call__(self, arguments: list[Any]) -> Any:
        """Run the segments up to the last one with a gradient that no identity returns; identities run the other segments.

        Autograd calls this as the compiled function's node. Return all results of the backward graph, with placeholders
        (None for plain tensors) for gradients that identities return later. If the call is not chained, run the full graph.
        """
        call_and_indices = _find_chained_gradients(self.chain.sources) if self.chain.is_used else None
        if call_and_indices is None:
            return self.full_runner(arguments)
        call, deferred_indices = call_and_indices
        arguments[:] = map(resolve_conj_and_neg, arguments)
        results = self._non_tensor_results(arguments)
        run = _Run(self._segments(), arguments, self.full_runner.step_for(arguments))
        last_segment = max(
            (segment for segment, indices in enumerate(self.chain.released) if not deferred_indices.issuperset(indices)),
            default=-1,
        )
        run.run_through(last_segment)
        call.runs[backward_pass()] = run
        after_this_backward(run.finish)
        for i in range(len(outputs_of(self.full_runner.module.graph))):
            if i not in results:
                results[i] = self._placeholder_result(i) if i in deferred_indices else run.results.pop(i)
        return [results[i] for i in sorted(results)]

    def _placeholder_result(self, index: int) -> Tensor | None:
        """Return the result for a gradient that an identity returns later: None, or a placeholder for a sharded tensor."""
        sharded = self.chain.sources[index].part
        return None if sharded is None else sharded.placeholder()

    def _non_tensor_results(self, arguments: Sequence[Any]) -> dict[int, Any]:
        """Return the results that are not tensors, by index: None, and objects among the graph's inputs (the mesh of a
        sharded tensor).
        """
        graph = self.full_runner.module.graph
        values = dict(zip(graph.find_nodes(op="placeholder"), arguments, strict=True))
        outputs = enumerate(outputs_of(graph))
        return {i: values.get(output, output) for i, output in outputs if not is_tensor(output)}

    def _segments(self) -> SegmentGenerator:
        """Return the generator function that runs the backward graph's segments (`generate_segments`), made on first use."""
        if self._generated is None:
            module = self.full_runner.module
            calls = [(segment, [code_call_of(node, module) for node in segment.operators]) for segment in self.release_segments]
            self._generated = generate_segments("backward", module.graph.find_nodes(op="placeholder"), calls)
        return self._generated


def _find_chained_gradients(sources: Sources) -> tuple[_StagewiseCall, set[int]] | None:
    """Return the call whose backward is running, and the indices of its chained gradients; None if it is not chained.

    Autograd's current node is the compiled function's. A gradient is chained if the edge for its input leads to the identity of
    exactly that input. Output 0 of an identity is its token, so output i + 1 belongs to its gradient i.
    """
    node = current_autograd_node()
    next_edges = () if node is None else node.next_functions
    identity_edges = [(function, index) if isinstance(function, _IDENTITY) else (None, 0) for function, index in next_edges]
    call = next((function.call for function, _ in identity_edges if function is not None), None)
    if call is None or len(call.input_indices) != len(identity_edges):
        return None
    gradient_indices = {
        function.gradient_indices[output_index - 1]
        for (function, output_index), input_index in zip(identity_edges, call.input_indices, strict=True)
        if function is not None
        and function.call is call
        and output_index
        and sources[function.gradient_indices[output_index - 1]].input_index == input_index
    }
    return (call, gradient_indices) if gradient_indices else None


_IDENTITY: Any = Identity._backward_cls
