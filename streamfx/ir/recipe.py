"""Recipes for outputs that were removed from a graph, and are computed when the caller accesses them.

Such outputs are large and cheap to recompute, for example logits: `Recipe` says how to compute one from the arguments and the
other results of the compiled graph, `OutputPlan` how to return the outputs that the caller expects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from streamfx.ir.sizes import Size


@dataclass(frozen=True)
class InputValue:
    """An argument of the compiled graph, by index."""

    index: int
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class OutputValue:
    """A result of the compiled graph, by index."""

    index: int
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class SizeValue:
    """A number computed from the sizes of the arguments."""

    size: Size

    def __str__(self) -> str:
        return str(self.size)


RecipeInput: TypeAlias = "InputValue | OutputValue | SizeValue"


@dataclass(frozen=True)
class Context:
    """Modes that a graph sets around an operator: the arguments of the enclosing autocasts, and a grad mode (None: not set)."""

    autocasts: tuple[tuple[Any, ...], ...] = ()
    grad: bool | None = None


@dataclass(frozen=True)
class RecipeProgram:
    """A graph of torch functions. `inputs` has the values of its last placeholders; the caller passes the values of the others.

    An operator that is not in `contexts` runs under the modes of the call.
    """

    graph: fx.Graph
    inputs: tuple[RecipeInput, ...]
    contexts: Mapping[fx.Node, Context] = field(default_factory=dict)

    def __str__(self) -> str:
        """Format the program, one call per line, with inputs by their names: `  logits = linear(hidden, weight)`."""
        placeholders = self.graph.find_nodes(op="placeholder")
        names = {node: str(item) for node, item in zip(reversed(placeholders), reversed(self.inputs), strict=False)}
        calls = [node for node in self.graph.nodes if node.op in ("call_function", "call_method")]
        return "\n".join(f"  {node.name} = {_call_text(node, names)}" for node in calls)


def _call_text(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """Format the call of an operator, as `linear(hidden, weight)`; `names` has the text of placeholders."""
    function = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target)
    # operands as `_Name`, whose repr has no quotes; other arguments print by their own repr
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda operand: _Name(names.get(operand, operand.name)))
    argument_texts = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
    return f"{function}({', '.join(argument_texts)})"


class _Name(str):
    """Text whose `repr` is the text itself."""

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class RowAxes:
    """Along which dimensions a recipe can be run on chunks of rows.

    Row i of the result's dimension n depends only on row i of dimension `dims[n]` of the program's input with index `source`,
    and on the other inputs. None: not for this dimension.
    """

    source: int
    dims: tuple[int | None, ...]


@dataclass(frozen=True)
class Recipe:
    """A program with one result, a dense tensor, and the metadata of that result; `rows` is None if it has no row dimension."""

    name: str
    program: RecipeProgram
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    rows: RowAxes | None = None

    def __str__(self) -> str:
        sizes, inputs = (", ".join(map(str, items)) for items in (self.shape, self.program.inputs))
        return f"{self.name} [{sizes}] {self.dtype} on {self.device}, from {inputs}"


@dataclass(frozen=True)
class SizeSources:
    """Where to read the value of each symbol: the index of an argument, and the dimension if the argument is a tensor."""

    locations: Mapping[sympy.Symbol, tuple[int, int | None]]

    def can_read(self, size: Size) -> bool:
        """Return whether the arguments determine all symbols of a size."""
        return isinstance(size, int) or size.free_symbols <= set(self.locations)

    def values(self, arguments: Sequence[Any]) -> dict[str, int]:
        """Read the value of each symbol from the arguments of a call, by the symbol's name."""
        return {
            symbol.name: int(arguments[index] if dim is None else arguments[index].shape[dim])
            for symbol, (index, dim) in self.locations.items()
        }


@dataclass(frozen=True)
class ReturnedOutput:
    """A result that the compiled graph returns, by index."""

    index: int


@dataclass(frozen=True)
class RebuiltOutput:
    """A result computed from the tensor of a recipe (by index): the tensor itself, or a view of it, computed by `view`."""

    recipe: int
    view: RecipeProgram | None


@dataclass(frozen=True)
class OutputPlan:
    """How to build the outputs for the caller.

    `order` has the index in `results` of each original output; None if the output is None. `sizes` evaluates dynamic sizes in
    `recipes`.
    """

    recipes: tuple[Recipe, ...]
    results: tuple[ReturnedOutput | RebuiltOutput, ...]
    order: tuple[int | None, ...]
    sizes: SizeSources

    def __str__(self) -> str:
        return "\n".join(f"deferred {recipe}\n{recipe.program}" for recipe in self.recipes)
