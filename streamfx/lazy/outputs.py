"""Build the outputs that the caller of a graph with deferred outputs receives.

The compiled graph returns other values than the user's function: those from which *deferred* outputs (lazy logits) are
recomputed, in place of these. The plan of a graph has a *recipe* for each: a recorded program, and the values that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from streamfx.ir.recipe import (
    InputValue,
    OutputPlan,
    OutputValue,
    RebuiltOutput,
    Recipe,
    RecipeInput,
    RecipeProgram,
    ReturnedOutput,
)
from streamfx.ir.sizes import Size
from streamfx.lazy.deferred import deferred
from streamfx.lazy.recompute import ChunkingDecision, RecomputeSource, UseCompiler, run_program
from streamfx.lazy.streamed import RowsInChunks
from streamfx.runtime.runtime_sizes import compiled_size


@dataclass(frozen=True)
class DeferredCall:
    """Calls a compiled graph and returns its results in the order of the original outputs, with deferred tensors.

    Inputs that the graph does not read (`unread`) are detached, so that autograd has no edge from the compiled backward graph to
    the head's weight. With such an edge, zero-bubble pipelines, which compute a weight's gradient from all nodes that lead to
    it, would run the backward graph twice.
    """

    compiled: Callable[..., Sequence[Any]]
    plan: OutputPlan
    compiler: UseCompiler | None = None
    unread: frozenset[int] = frozenset()

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        """Run the compiled graph, and return the original outputs in order, deferred ones as deferred tensors."""
        outputs = self.compiled(*(_detached(value) if i in self.unread else value for i, value in enumerate(arguments)))
        sizes = self.plan.sizes.values(arguments)
        chunking = ChunkingDecision(self.compiler, RowsInChunks())
        tensors = [self._deferred(recipe, arguments, outputs, sizes, chunking) for recipe in self.plan.recipes]

        def result(output: ReturnedOutput | RebuiltOutput) -> Any:
            """Return one output for the caller: an output of the compiled graph, or a deferred tensor, or a view of one."""
            if isinstance(output, ReturnedOutput):
                return outputs[output.index]
            return _apply_view(tensors[output.recipe], output.view, sizes)

        results = [result(item) for item in self.plan.results]
        return tuple(None if index is None else results[index] for index in self.plan.order)

    def _deferred(
        self,
        recipe: Recipe,
        arguments: Sequence[Any],
        outputs: Sequence[Any],
        sizes: Mapping[str, int],
        chunking: ChunkingDecision,
    ) -> Tensor:
        """Return the deferred tensor for a recipe.

        The recipe reads inputs (`arguments`) and outputs of this call of the compiled graph, and `sizes` (symbol -> value). The
        outputs of one call share `chunking`: whether they are all recomputed in chunks of the sequence.
        """
        values = [_input_value(item, arguments, outputs, sizes) for item in recipe.program.inputs]
        shape, strides = ([_size(size, sizes) for size in dims] for dims in (recipe.shape, recipe.strides))
        like = torch.empty_strided(shape, strides, dtype=recipe.dtype, device="meta")
        return deferred(RecomputeSource(recipe, values, like.numel(), chunking), like, values)


def _detached(argument: Any) -> Any:
    """Return an alias without a gradient of a tensor that requires one; any other argument unchanged."""
    return argument.detach() if isinstance(argument, Tensor) and argument.requires_grad else argument


def _apply_view(tensor: Tensor, view: RecipeProgram | None, sizes: Mapping[str, int]) -> Tensor:
    """Return the view of a deferred tensor that a recorded program computes; the tensor itself if `view` is None."""
    if view is None:
        return tensor
    result: Tensor = run_program(view, [tensor, *(_input_value(item, (), (), sizes) for item in view.inputs)])
    return result


def _input_value(item: RecipeInput, arguments: Sequence[Any], outputs: Sequence[Any], sizes: Mapping[str, int]) -> Any:
    """Return the value that a recipe's input describes: an argument of the call, an output of the compiled graph, or a size."""
    if isinstance(item, InputValue):
        return arguments[item.index]
    if isinstance(item, OutputValue):
        return outputs[item.index]
    return _size(item.size, sizes)


def _size(size: Size, sizes: Mapping[str, int]) -> int:
    """Return the integer value of a size (an integer or an expression), given the value of each symbol by name."""
    return size if isinstance(size, int) else _size_function(size)(dict(sizes))


_size_function = cache(compiled_size)
