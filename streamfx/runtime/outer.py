"""Runs an outer graph as a function that is written for it: few operators and loops, each value dropped after its last use.

# NOTE [What a run needs lives in that run]
Several threads may call one compiled model at once, a backward half may run inside of another, and the next forward half may
begin before the backward half of the last one. So what is made when a graph is compiled (runners, loops, bodies, segments, mask
programs) is never written to by a run; values, and what is found out about them, belong to the run. Code that is written when it
is first needed, and which code is for a layout, is the same whoever finds it. `fx.Interpreter` is not used, which keeps values on
itself and notes in a global of torch's which node it runs: a graph that another thread traces at that moment would take that
node's facts for its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from streamfx.errors import StaleGraphError
from streamfx.kernels.mask_programs import MaskCache, looking
from streamfx.runtime.expanded_code import CodeCall, function_of
from streamfx.runtime.probes import watching
from streamfx.runtime.restride import reinterpreted, unmarked

aten = torch.ops.aten
COPIES_WHERE_NEEDED: dict[Any, Any] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten.view.dtype: reinterpreted,
}
LOOKS = "_streamfx_looks"  # an attribute of what a forward half saves: what it has found of masks


class OuterGraph:
    """An outer graph as a function; it holds nothing of a run."""

    def __init__(self, module: fx.GraphModule) -> None:
        graph = module.graph
        calls = [call_of(node, module) for node in graph.nodes if node.op not in ("placeholder", "output")]
        given, result = graph.find_nodes(op="placeholder"), graph.output_node().args[0]
        self._function = function_of("outer", given, calls, result, boxed=True)

    def run(self, arguments: list[Any]) -> Any:
        """The results; `arguments` is emptied, so that nothing holds a value after its last use."""
        return self._function(arguments)


def call_of(node: fx.Node, module: fx.GraphModule) -> CodeCall:
    run = _function_of(node, module)
    body = getattr(getattr(run, "__self__", None), "body", None)
    operators = tuple(body.graph.nodes) if isinstance(body, fx.GraphModule) else (node,)
    return CodeCall(run, node.args, dict(node.kwargs), node, operators)


def _function_of(node: fx.Node, module: fx.GraphModule) -> Callable[..., Any]:
    """What a node calls. Views copy where they have to: kernels may lay a result out in another way than their fake counterparts
    promised. Loops are called as functions: hooks that somebody set on all modules (FLOP counters do) expect gradients inside.
    """
    if node.op == "call_function":
        return COPIES_WHERE_NEEDED.get(node.target, node.target)  # type: ignore[no-any-return,arg-type]
    if node.op == "call_module":
        return module.get_submodule(str(node.target)).forward  # type: ignore[no-any-return]
    if node.op == "call_method":
        return lambda owner, *args, **kwargs: getattr(owner, str(node.target))(*args, **kwargs)
    return lambda: operator.attrgetter(str(node.target))(module)


def _savable(result: Any) -> Any:
    """Autograd saves no tensors that were made in inference mode, as some libraries make their packed weights."""
    return result.clone() if isinstance(result, Tensor) and result.is_inference() else result


class OuterRunner:
    """A boxed callable: takes one list of inputs, empties it, returns the outputs. See NOTE [What a run needs lives in that run].

    `saves_after` is given for a forward half: so many results are the caller's, and the others are saved for the backward half.
    `asks` tells which inputs of a forward half the graph was compiled to compute gradients for. A backward half takes gradients
    that code outside has made, and may have marked as conjugates or negatives.
    """

    def __init__(
        self, module: fx.GraphModule, saves_after: int | None = None, asks: Sequence[bool] = (), is_backward: bool = False
    ) -> None:
        self.module = module
        self._graph = OuterGraph(module)
        self._saves_after, self._asks, self._is_backward = saves_after, tuple(asks), is_backward
        self.about: Any = None  # what a measurement is told of a forward half
        self._boxed_call = True  # on the instance: torch._dynamo.disable copies no class attributes

    def __call__(self, arguments: list[Any]) -> Any:
        self._check_gradients(arguments)
        if watching.by is not None and self._saves_after is not None:
            watching.by.half(self.about)
        if self._is_backward:
            arguments[:] = map(unmarked, arguments)
        given = {id(argument) for argument in arguments} if self._saves_after is not None else set()
        with torch.no_grad(), looking(found_before(arguments)) as looks:
            results = self._graph.run(arguments)
        if self._saves_after is None:
            return results
        results = [_savable(result) for result in results]
        _hand_on(looks, results[: self._saves_after], results[self._saves_after :], given)
        return results

    def _check_gradients(self, arguments: Sequence[Any]) -> None:
        """Refuse inputs that ask for gradients which the graph was not compiled for (torch 2.11 does not notice them)."""
        late = [i for i, asked in enumerate(self._asks) if not asked and _asks_gradient(arguments[i])]
        if late:
            names = [node.name for node in self.module.graph.find_nodes(op="placeholder")]
            raise StaleGraphError(
                "a parameter asks for a gradient that the compiled graph does not compute",
                found=f"requires_grad was switched on after compilation for {', '.join(names[i] for i in late)}",
                do="call torch._dynamo.reset() after requires_grad_(True), so that the model is compiled again",
            )


def _asks_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _hand_on(looks: MaskCache, results: Sequence[Any], saved: Sequence[Any], given: set[int]) -> None:
    """Let the backward half find what this forward half has found of masks: it comes with what is saved for it alone."""
    others = given.union(map(id, results))
    for value in saved:
        if isinstance(value, Tensor) and id(value) not in others:
            setattr(value, LOOKS, looks)


def found_before(arguments: Sequence[Any]) -> MaskCache:
    """What the forward half has found, for its backward half; nothing for others, or where hooks have packed what was saved."""
    found = (getattr(argument, LOOKS, None) for argument in arguments if isinstance(argument, Tensor))
    return next((looks for looks in found if looks is not None), None) or MaskCache()
