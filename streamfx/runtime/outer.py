"""Run a host program as a generated function: few operators and loops, each value dropped after its last use.

# NOTE [Runs share no state]
Several threads may call one compiled model at once, a backward graph may run inside another one, and the next forward
graph may begin before the last backward graph. So a run never writes to objects that were created at compile time
(runners, loops, loop bodies, segments, mask programs); values, and facts about them, belong to the run. Lazily
generated code, and the choice of code for a layout, do not depend on the run that creates them. `fx.Interpreter` is
not used: it stores values on itself, and records the running node in a global of torch. A graph that another thread
traces at that moment would take its metadata from that node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from streamfx.errors import StaleGraphError
from streamfx.kernels.mask_programs import MaskCache, use_mask_cache
from streamfx.runtime.expanded_code import CodeCall, function_of
from streamfx.runtime.probes import watching
from streamfx.runtime.restride import reinterpreted, unmarked

aten = torch.ops.aten
COPIES_WHERE_NEEDED: dict[Any, Any] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten.view.dtype: reinterpreted,
}
MASK_CACHE_ATTRIBUTE = "_streamfx_looks"  # attribute of a value saved by a forward graph: the mask cache of its step


class HostProgram:
    """A host program as a function; it holds no state of a run."""

    def __init__(self, module: fx.GraphModule) -> None:
        """Generate the function of the host program."""
        graph = module.graph
        calls = [call_of(node, module) for node in graph.nodes if node.op not in ("placeholder", "output")]
        inputs, result = graph.find_nodes(op="placeholder"), graph.output_node().args[0]
        self._function = function_of("outer", inputs, calls, result, boxed=True)

    def run(self, arguments: list[Any]) -> Any:
        """Return the results. `arguments` is emptied, so that nothing holds a value after its last use."""
        return self._function(arguments)


def call_of(node: fx.Node, module: fx.GraphModule) -> CodeCall:
    """Return the generated-code call of a node; for a loop it represents all operators of the body, so errors name them."""
    run = _function_of(node, module)
    body = getattr(getattr(run, "__self__", None), "body", None)
    operators = tuple(body.graph.nodes) if isinstance(body, fx.GraphModule) else (node,)
    return CodeCall(run, node.args, dict(node.kwargs), node, operators)


def _function_of(node: fx.Node, module: fx.GraphModule) -> Callable[..., Any]:
    """Return the callable of a node.

    Views copy if necessary, because a kernel's real result may have another layout than its fake one. A loop's
    `forward` is called directly, because global module hooks (as of FLOP counters) expect gradients inside.
    """
    if node.op == "call_function":
        return COPIES_WHERE_NEEDED.get(node.target, node.target)  # type: ignore[no-any-return,arg-type]
    if node.op == "call_module":
        return module.get_submodule(str(node.target)).forward  # type: ignore[no-any-return]
    if node.op == "call_method":
        return lambda owner, *args, **kwargs: getattr(owner, str(node.target))(*args, **kwargs)
    return lambda: operator.attrgetter(str(node.target))(module)


def _savable(result: Any) -> Any:
    """Clone tensors that were created in inference mode, which autograd cannot save.

    Some libraries create packed weights that way.
    """
    return result.clone() if isinstance(result, Tensor) and result.is_inference() else result


class HostProgramRunner:
    """A boxed callable: takes one list of inputs, empties it, returns the outputs. See NOTE [Runs share no state].

    `saves_after` is set for a forward graph: this many results belong to the caller, and the others are saved for the
    backward graph. `asks`: for which inputs of a forward graph the compiled graph computes gradients. A backward
    graph unmarks its inputs, because user code may have produced gradients that are lazy conjugates or negatives.
    """

    def __init__(
        self, module: fx.GraphModule, saves_after: int | None = None, asks: Sequence[bool] = (), is_backward: bool = False
    ) -> None:
        """Wrap a host program; see the class for the flags."""
        self.module = module
        self._graph = HostProgram(module)
        self._saves_after, self._asks, self._is_backward = saves_after, tuple(asks), is_backward
        self.about: Any = None  # description of a forward graph, passed to a probe
        self._boxed_call = True  # on the instance, because torch._dynamo.disable does not copy class attributes

    def __call__(self, arguments: list[Any]) -> Any:
        """Run the host program without gradients; a forward graph also passes its mask cache on to its backward graph."""
        self._check_gradients(arguments)
        if watching.by is not None and self._saves_after is not None:
            watching.by.half(self.about)
        if self._is_backward:
            arguments[:] = map(unmarked, arguments)
        input_ids = {id(argument) for argument in arguments} if self._saves_after is not None else set()
        with torch.no_grad(), use_mask_cache(mask_cache_of(arguments)) as mask_cache:
            results = self._graph.run(arguments)
        if self._saves_after is None:
            return results
        results = [_savable(result) for result in results]
        _attach_cache(mask_cache, results[: self._saves_after], results[self._saves_after :], input_ids)
        return results

    def _check_gradients(self, arguments: Sequence[Any]) -> None:
        """Refuse inputs that require gradients which the graph was not compiled for (torch 2.11 does not detect them)."""
        newly_requiring = [i for i, is_computed in enumerate(self._asks) if not is_computed and _asks_gradient(arguments[i])]
        if newly_requiring:
            names = [node.name for node in self.module.graph.find_nodes(op="placeholder")]
            raise StaleGraphError(
                "a parameter asks for a gradient that the compiled graph does not compute",
                found=f"requires_grad was switched on after compilation for {', '.join(names[i] for i in newly_requiring)}",
                do="call torch._dynamo.reset() after requires_grad_(True), so that the model is compiled again",
            )


def _asks_gradient(value: Any) -> bool:
    """Return whether a value is a tensor that requires a gradient."""
    return isinstance(value, Tensor) and value.requires_grad


def _attach_cache(mask_cache: MaskCache, results: Sequence[Any], saved: Sequence[Any], input_ids: set[int]) -> None:
    """Attach the mask cache to a value that is saved only for the backward graph, so that the backward graph finds it."""
    excluded_ids = input_ids.union(map(id, results))
    for value in saved:
        if isinstance(value, Tensor) and id(value) not in excluded_ids:
            setattr(value, MASK_CACHE_ATTRIBUTE, mask_cache)


def mask_cache_of(arguments: Sequence[Any]) -> MaskCache:
    """Return the mask cache of the forward graph if `arguments` belong to its backward graph, otherwise an empty one.

    It is also empty if saved tensor hooks have packed the values.
    """
    caches = (getattr(argument, MASK_CACHE_ATTRIBUTE, None) for argument in arguments if isinstance(argument, Tensor))
    return next((mask_cache for mask_cache in caches if mask_cache is not None), None) or MaskCache()
