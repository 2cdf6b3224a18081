"""Run a host program as a generated function: few operators and loops, each value dropped after its last use.

A host program is the graph that runs in place of the forward or the backward graph; its loops run their bodies once per chunk
of the sequence.

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
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from streamfx.errors import StaleGraphError
from streamfx.kernels.mask_programs import MaskCache, use_mask_cache
from streamfx.runtime.expanded_code import CodeCall, generate_function
from streamfx.runtime.probes import measurement
from streamfx.runtime.restride import reinterpreted, resolve_conj_and_neg
from streamfx.runtime.step_bodies import STEP_ATTRIBUTE, StepBodies, program_of, use_step
from streamfx.torch_private import is_traceable_wrapper_subclass

aten = torch.ops.aten
COPYING_VIEWS: dict[Any, Any] = {  # views, and operators that copy if the operand's layout allows no view
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten.view.dtype: reinterpreted,
}
MASK_CACHE_ATTRIBUTE = "_streamfx_mask_cache"  # attribute of a value saved by a forward graph: the mask cache of its step


class HostProgram:
    """A host program as a function; it holds no state of a run."""

    def __init__(self, module: fx.GraphModule) -> None:
        """Generate the function of the host program."""
        graph = module.graph
        calls = [code_call_of(node, module) for node in graph.nodes if node.op not in ("placeholder", "output")]
        inputs, result = graph.find_nodes(op="placeholder"), graph.output_node().args[0]
        self._function = generate_function("outer", inputs, calls, result, boxed=True)

    def run(self, arguments: list[Any]) -> Any:
        """Run the program on these inputs and return the results, in AOTAutograd's boxed calling convention.

        The program takes the inputs out of the list `arguments`, which is empty afterwards: so neither the caller nor the list
        holds an input after its last use.
        """
        return self._function(arguments)


def code_call_of(node: fx.Node, module: fx.GraphModule) -> CodeCall:
    """Return a node as a call in generated code. The call of a loop names all operators of its body, for error messages."""
    run = _callable_of(node, module)
    body = getattr(getattr(run, "__self__", None), "body", None)
    operators = tuple(body.graph.nodes) if isinstance(body, fx.GraphModule) else (node,)
    return CodeCall(run, node.args, dict(node.kwargs), node, operators)


def _callable_of(node: fx.Node, module: fx.GraphModule) -> Callable[..., Any]:
    """Return the function that runs a node, given its arguments.

    Views copy if necessary, because a kernel's real result may have another layout than its fake one. A loop's
    `forward` is called directly, because global module hooks (as of FLOP counters) expect gradients inside.
    """
    if node.op == "call_function":
        return COPYING_VIEWS.get(node.target, node.target)  # type: ignore[no-any-return,arg-type]
    if node.op == "call_module":
        return module.get_submodule(str(node.target)).forward  # type: ignore[no-any-return]
    if node.op == "call_method":
        return lambda owner, *args, **kwargs: getattr(owner, str(node.target))(*args, **kwargs)
    return lambda: operator.attrgetter(str(node.target))(module)


def _savable(result: Any) -> Any:
    """Return a clone of a tensor that was created in inference mode, which autograd cannot save; other results unchanged.

    Some libraries create packed weights that way.
    """
    return result.clone() if isinstance(result, Tensor) and result.is_inference() else result


class HostProgramRunner:
    """A boxed callable: takes one list of inputs, empties it, returns the outputs. See NOTE [Runs share no state].

    `num_outputs` is set for a forward graph: the first results are its outputs, the others are saved for the backward
    graph. `needs_gradient`: for each input of a forward graph, whether the backward graph computes its gradient. A
    backward graph resolves its inputs, because user code may have produced lazy conjugates or negatives.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        num_outputs: int | None = None,
        needs_gradient: Sequence[bool] = (),
        is_backward: bool = False,
    ) -> None:
        """Wrap a host program; the class explains the other arguments."""
        self.module = module
        self._graph = HostProgram(module)
        self._num_outputs, self._needs_gradient, self._is_backward = num_outputs, tuple(needs_gradient), is_backward
        self.background = program_of(module)
        self.description: Any = None  # description of a forward graph, passed to a probe
        self._boxed_call = True  # on the instance, because torch._dynamo.disable does not copy class attributes

    def __call__(self, arguments: list[Any]) -> Any:
        """Run the host program without gradients, and return its results.

        A forward graph also passes its cache of evaluated masks to its backward graph, on a saved value.
        """
        self._check_gradients(arguments)
        if measurement.probe is not None and self._num_outputs is not None:
            measurement.probe.on_forward(self.description)
        if self._is_backward:
            arguments[:] = map(resolve_conj_and_neg, arguments)
        # weak, because the run frees inputs; by `id`, a new tensor in the place of a freed one would be taken for an input
        inputs = [weakref.ref(value) for value in arguments if isinstance(value, Tensor)] if self._num_outputs is not None else []
        memories = _memories(arguments) if inputs and self.background is not None else set()
        with torch.no_grad(), use_mask_cache(mask_cache_of(arguments)) as mask_cache, use_step(self.step_for(arguments)) as step:
            results = self._graph.run(arguments)
        if self._num_outputs is None:
            return results
        results = [_savable(result) for result in results]
        outputs = results[: self._num_outputs]
        excluded_ids = {*(id(reference()) for reference in inputs), *map(id, outputs)}
        if step is not None:
            _own_one_view(results, self._num_outputs, memories | _memories(outputs))
        is_saved = _attach(mask_cache, step, results[self._num_outputs :], excluded_ids)
        if self.background is not None:
            self.background.end_forward(step, is_saved)
        return results

    def step_for(self, arguments: Sequence[Any]) -> StepBodies | None:
        """Return the step to which a run with these inputs belongs: a new one for a forward graph.

        Return None if another process compiles no bodies of this program.
        """
        if self.background is None:
            return None
        return self.background.begin_backward(arguments) if self._is_backward else self.background.begin_forward()

    def _check_gradients(self, arguments: Sequence[Any]) -> None:
        """Raise an error if an input requires a gradient that the graph does not compute; torch 2.11 does not detect this."""
        newly_requiring = [
            i for i, is_computed in enumerate(self._needs_gradient) if not is_computed and _requires_gradient(arguments[i])
        ]
        if newly_requiring:
            names = [node.name for node in self.module.graph.find_nodes(op="placeholder")]
            raise StaleGraphError(
                "a parameter requires a gradient that the compiled graph does not compute",
                found=f"requires_grad was switched on after compilation for {', '.join(names[i] for i in newly_requiring)}",
                do="call torch._dynamo.reset() after requires_grad_(True), so that the model is compiled again",
            )


def _requires_gradient(value: Any) -> bool:
    """Return whether a value is a tensor that requires a gradient."""
    return isinstance(value, Tensor) and value.requires_grad


def _attach(mask_cache: MaskCache, step: StepBodies | None, saved: Sequence[Any], excluded_ids: set[int]) -> bool:
    """Attach the cache of evaluated masks, and the step, to the values that are saved only for the backward graph.

    The backward graph finds them there. Other values are the user's: results of the forward graph, and its inputs (by `id`).
    Return whether there is such a value that autograd saves as it is, which it does not for views.
    """
    is_saved = False
    for value in saved:
        if isinstance(value, Tensor) and id(value) not in excluded_ids:
            setattr(value, MASK_CACHE_ATTRIBUTE, mask_cache)
            if step is not None:
                setattr(value, STEP_ATTRIBUTE, step)
            is_saved = is_saved or not value._is_view()
    return is_saved


def _memories(values: Sequence[Any]) -> set[int]:
    """Return identifiers of the memory of all tensors among these values, except for subclasses that hold other tensors."""
    tensors = (value for value in values if isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value))
    return {value.untyped_storage()._cdata for value in tensors}


def _own_one_view(results: list[Any], num_outputs: int, memories: set[int]) -> None:
    """Replace one saved view, in place, by a tensor with its memory that is no view, if all values saved only here are views.

    `memories` are those of the user's inputs and results (see `_memories`). A view of them stays, because autograd checks that
    nobody writes to it. So do inputs and results that are saved: they have such a memory.
    """
    own = [i for i in range(num_outputs, len(results)) if type(results[i]) is Tensor and not memories & _memories([results[i]])]
    if own and all(results[i]._is_view() for i in own):
        view = results[own[0]]
        place = view.untyped_storage(), view.storage_offset(), view.shape, view.stride()
        results[own[0]] = view.new_empty(0).set_(*place)


def mask_cache_of(arguments: Sequence[Any]) -> MaskCache:
    """Return the cache of evaluated masks that a forward graph attached to one of the inputs of its backward graph.

    Otherwise, for example for the inputs of a forward graph, return an empty cache. It is also empty if saved tensor
    hooks have packed the values.
    """
    caches = (getattr(argument, MASK_CACHE_ATTRIBUTE, None) for argument in arguments if isinstance(argument, Tensor))
    return next((mask_cache for mask_cache in caches if mask_cache is not None), None) or MaskCache()
