"""A tensor subclass whose values are computed when they are first used.

To callers it is the dense tensor: sizes, strides, dtype, device, `requires_grad` and `grad_fn` are real. Its history is one
autograd node that leads to the tensors from which it is recomputed, so all autograd features (hooks, `retain_grad`, in-place
operators, views, custom functions) work unchanged. Below autograd, in `__torch_dispatch__`, views, casts and functions of large
values stay deferred (`steps.py`). Small results are computed in chunks of the sequence (`streamed.py`). All other operators run
on the dense values of their operands.

A *cell* (`lazy_values.py`) holds the value of a deferred tensor once it is computed, or else how to compute it: the *source* (a
recorded program, and the tensors that it reads), or the operator and its operand cells. A *traced* tensor was created by a
compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from streamfx.errors import TransposedOutputError
from streamfx.ir.operator_table import returns_view
from streamfx.lazy.direct_methods import override_direct_methods
from streamfx.lazy.lazy_values import Cell, DeferredOperator
from streamfx.lazy.recompute import RecomputeSource, with_distinct_memory
from streamfx.lazy.steps import (
    cast,
    defer_function,
    defer_write,
    is_lazy_cast,
    is_small_part,
    is_small_view,
    is_wide,
    view_cells,
    written_values,
)
from streamfx.lazy.streamed import compute_gradients_in_chunks, compute_in_chunks
from streamfx.torch_private import (
    DISABLED_TORCH_FUNCTION,
    is_composite,
    no_dispatch,
    no_modes,
    reentrant_dispatch,
    retains_graph,
    untraced,
    wrapper_tensor,
)
from streamfx.torch_private.autograd import nodes_to_execute

# NOTE [Gradients that spread]
# Autograd's formulas for `gather`, `max`, `topk`, an index or a slice allocate zeros of the operand's shape from the result's
# gradient, without reading the operand. So the gradient of a small part of a large deferred tensor becomes a deferred tensor
# just before the formula runs, and the results of the formula are then also deferred.

aten = torch.ops.aten
FREED = (
    "Trying to backward through the graph a second time: the first backward pass has freed the graph before a deferred output. "
    "Specify retain_graph=True if you need to backward through the graph a second time."
)
_data: Any = Tensor.data


class DeferredTensor(Tensor):
    """Looks and behaves like the dense tensor, but computes its values only if they are needed."""

    _cell: Cell
    _traced: bool  # created by a compiler that traces, which must see plain tensors only
    _has_views = False  # whether views of it exist
    _is_reshaped_after_views = False  # by an in-place view, after views were taken, with a gradient required
    _is_small_part = False  # small part of a large value that is not computed yet: see NOTE [Gradients that spread]

    __torch_function__ = DISABLED_TORCH_FUNCTION  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, cell: Cell, device: torch.device, traced: bool = False) -> DeferredTensor:
        tensor: DeferredTensor = wrapper_tensor(cls, cell.like, device)
        tensor._cell, tensor._traced = cell, traced
        return tensor

    def __init__(self, cell: Cell, device: torch.device, traced: bool = False) -> None:
        super().__init__()

    @classmethod
    @untraced
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _dispatched(func, args, kwargs or {})

    @untraced
    def _dense(self) -> Tensor:
        """Compute this tensor and return it as a plain tensor, in the memory that it shares with its views.

        If it requires a gradient, so does the result.
        """
        plain: Tensor = ToDense.apply(self) if self.requires_grad else _shared_memory(self)
        return plain

    # -- memory that torch reads directly, bypassing dispatch

    def __tensor_flatten__(self) -> tuple[list[str], tuple[()]]:
        """Say to compilers that this tensor consists of the plain tensor `_memory`."""
        return ["_memory"], ()

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> DeferredTensor:
        """Return a tensor over the plain tensor `_memory`, for compilers that trace it."""
        memory = inner["_memory"]
        return cls(Cell(memory, value=memory), memory.device, traced=True)

    @property
    @untraced
    def _memory(self) -> Tensor:
        """The computed dense values, in the memory that all views share, for writing."""
        with no_modes():  # a tracer reads this under its own modes
            return self._cell.writable()

    @property
    def data(self) -> Tensor:
        """An alias of this tensor with a separate version counter, so that autograd does not see writes to it."""
        alias = self.detach()
        return alias if self._traced or not isinstance(alias, DeferredTensor) else _tensor_of_cell(alias._cell, self.device)

    @data.setter
    def data(self, value: Tensor) -> None:
        _data.__set__(self, value)
        self._cell = Cell(value, value=value.detach())

    @untraced
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._dense())

    def __format__(self, specification: str) -> str:
        return format(self._dense(), specification)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._dense().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self._dense().__deepcopy__(memo)
        return memo[id(self)]


override_direct_methods(DeferredTensor, dense=lambda tensor: tensor._dense(), memory=lambda tensor: tensor._memory)


class ToDense(torch.autograd.Function):
    """Convert a deferred tensor to a plain one that requires a gradient; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: DeferredTensor) -> Tensor:
        return _shared_memory(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class DeferredOutput(torch.autograd.Function):
    """Create a deferred tensor: an autograd node from the values that a recipe (a recorded program) reads to its result."""

    @staticmethod
    def forward(ctx: Any, source: RecomputeSource, like: Tensor, *values: Any) -> Tensor:
        """Return a deferred tensor like `like`; `values` (which `source` reads) are arguments to get gradients from this node."""
        ctx.source, ctx.freed = source, frozenset()
        ctx.set_materialize_grads(False)
        return DeferredTensor(Cell(like, source), source.recipe.device)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[override]
    @untraced
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        """Return None for `source` and `like`, and the gradients (or None) of the values that the recipe reads."""
        if gradient is None:
            return (None,) * (2 + len(ctx.source.recipe.program.inputs))
        running = nodes_to_execute(ctx.next_functions)  # autograd nodes that get these gradients in this backward pass
        if not ctx.freed.isdisjoint(running):
            raise RuntimeError(FREED)  # these nodes would also raise it, but only after the head's weight got a second gradient
        ctx.freed |= frozenset() if retains_graph() else running
        return (None, None, *_gradients(ctx.source, gradient))


def _gradients(source: RecomputeSource, gradient: Tensor) -> Sequence[Tensor | None]:
    """Return the gradient (or None) of each value that a recipe reads, given the gradient of its result.

    If `gradient` is deferred, large and not computed yet, they are computed in chunks if possible, so that it never exists.
    """
    if isinstance(gradient, DeferredTensor) and is_wide(gradient._cell) and not source.is_computed:
        streamed = compute_gradients_in_chunks(source, gradient._cell)
        if streamed is not None:
            return with_distinct_memory(streamed, gradient)
    # The consumers expect plain tensors. If the gradient of the logits is deferred, so may be that of the hidden states.
    dense = [item._cell.read() if isinstance(item, DeferredTensor) else item for item in source.gradients(gradient)]
    return with_distinct_memory(dense, gradient)


def deferred(source: RecomputeSource, like: Tensor, values: Sequence[Any]) -> Tensor:
    """Return a deferred tensor with the metadata of `like`, a meta tensor, recomputed from `source` when it is first used.

    `values` are the tensors, numbers and sizes that `source` reads. If the source does not wait for the first use, because its
    result is small, compute it now.
    """
    if source.differentiable:
        tensor: DeferredTensor = DeferredOutput.apply(source, like, *values)
    else:
        tensor = DeferredTensor(Cell(like, source), source.recipe.device)
    if not source.waits:
        tensor._cell.read()
    return tensor


# -- operators


def _dispatched(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on deferred tensors, below autograd: return deferred results if possible, else run it on dense values."""
    if is_composite(func):  # inference mode dispatches composite operators here, which are otherwise decomposed before
        return func.decompose(*args, **kwargs)
    deferred_operands = [item for item in pytree.tree_leaves((args, dict(kwargs))) if isinstance(item, DeferredTensor)]
    for tensor in deferred_operands:
        _register_gradient_hook(tensor)
    if torch.Tag.inplace_view in func.tags:
        return _run_inplace_view(func, args, kwargs)
    if func._schema.is_mutable:
        return _run_write(func, args, kwargs)
    if not any(tensor._traced for tensor in deferred_operands):
        results = _deferred_results(func, args, kwargs, deferred_operands)
        if results is not None:
            return results
    return func(*_map_deferred(args, _read_dense), **_map_deferred(kwargs, _read_dense))


def _deferred_results(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], deferred_operands: Sequence[DeferredTensor]
) -> Any:
    """Return the deferred result, or results, of an operator on deferred tensors; None if the operator has to run now.

    Views and casts stay deferred, and functions of large values. If all results are small, they are computed at once, in chunks
    if possible; they are plain tensors unless autograd records the operator.
    """
    device = deferred_operands[0].device
    args, kwargs = _map_deferred(tuple(args), _cell_of), _map_deferred(dict(kwargs), _cell_of)
    first_cell = args[0] if args and isinstance(args[0], Cell) else None
    if first_cell is not None and returns_view(func):
        deferred_operands[0]._has_views = True
        with reentrant_dispatch():
            views = view_cells(func, first_cell, args[1:], kwargs)
        return [_tensor_of_cell(view, device) for view in views] if isinstance(views, list) else _tensor_of_cell(views, device)
    if first_cell is not None and is_lazy_cast(func, first_cell, kwargs, device):
        return _tensor_of_cell(cast(func, first_cell, kwargs), device)
    cells = defer_function(func, args, kwargs, device)
    if cells is None:
        return None
    results = [_tensor_of_cell(cell, device) for cell in cells]
    if all(is_small_part(cell) for cell in cells):
        _compute(cells)
        recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in deferred_operands)
        results = [tensor if recorded else tensor._cell.value for tensor in results]  # type: ignore[misc]
    return results[0] if len(func._schema.returns) == 1 else tuple(results)


def _tensor_of_cell(cell: Cell, device: torch.device) -> DeferredTensor:
    """Return a deferred tensor of a cell. If it is a small part of a large value, its gradients will stay deferred."""
    tensor = DeferredTensor(cell, device)
    tensor._is_small_part = is_small_part(cell) or is_small_view(cell)
    return tensor


def _register_gradient_hook(tensor: DeferredTensor) -> None:
    """Register a hook that defers the gradient of a small part (an index, a maximum) of a large value, when it is first used.

    Otherwise autograd's formula would allocate zeros of the large shape. Before its first use, it may have no `grad_fn`.
    """
    if not tensor._is_small_part or not torch.is_grad_enabled():
        return
    with reentrant_dispatch():  # if the base of a view was written to, autograd rebuilds the view's history here
        grad_fn = tensor.grad_fn
    if grad_fn is not None:
        tensor._is_small_part = False
        grad_fn.register_prehook(_defer_gradients)


def _defer_gradients(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return deferred copies of the plain gradients of a small part of a large value, before its `grad_fn` runs on them.

    Their values exist, but with `spreads=True`, large results of operators on them are deferred.
    """

    def deferred_copy(gradient: Tensor) -> Tensor:
        copy = gradient.detach().clone()  # a hook may write into the gradient before the deferred gradient is computed
        return DeferredTensor(Cell(copy, value=copy, spreads=True), gradient.device)

    # with create_graph=True, a gradient has a history and must keep it
    return tuple(deferred_copy(grad) if type(grad) is Tensor and not grad.requires_grad else grad for grad in gradients)


def _compute(cells: Sequence[Cell]) -> None:
    """Compute the values of small cells, in chunks if the large values that they depend on then need not exist."""
    with reentrant_dispatch():
        values = compute_in_chunks(cells)
        for cell, value in zip(cells, values or (), strict=False):
            cell.keep(value)
        for cell in cells:
            cell.read()


def _cell_of(tensor: DeferredTensor) -> Cell:
    return tensor._cell


def _shared_memory(tensor: DeferredTensor) -> Tensor:
    """Compute a deferred tensor, and return a new plain tensor over the memory that it shares with its views."""
    return tensor._cell.writable().detach()


def _read_dense(tensor: DeferredTensor) -> Tensor:
    """Return the dense values of a deferred tensor, for reading; a small part of a large value is computed in chunks."""
    if is_small_part(tensor._cell):
        _compute([tensor._cell])
    with reentrant_dispatch():  # a recipe runs under the modes of its call, not under ours
        return tensor._cell.read()


def _writable(tensor: DeferredTensor) -> Tensor:
    """Return the dense values of a deferred tensor, for writing, in the memory that it shares with its views."""
    with reentrant_dispatch():
        return tensor._cell.writable()


def _map_deferred(values: Any, convert: Callable[[DeferredTensor], Any]) -> Any:
    """Return nested arguments with each deferred tensor replaced by `convert` of it."""
    return pytree.tree_map_only(DeferredTensor, convert, values)


def _run_write(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator that writes into its arguments, of which some are deferred; return the written tensors as its results.

    An in-place operator on a deferred tensor that is not computed yet is itself deferred if possible. Otherwise the operator
    runs on dense values; it writes into the memory that deferred tensors share with their views.
    """
    targets = {id(value): value for value in written_values(func, args, kwargs) if isinstance(value, DeferredTensor)}
    for value in targets.values():
        _refuse_reshaped(value, func)
    target, *rest = args if args and isinstance(args[0], DeferredTensor) else (None,)
    if target is not None and not target._traced:
        others, cell_kwargs = _map_deferred(tuple(rest), _cell_of), _map_deferred(dict(kwargs), _cell_of)
        if defer_write(func, target._cell, others, cell_kwargs, target.device):
            return target
    by_value: dict[int, DeferredTensor] = {}

    def get(tensor: DeferredTensor) -> Tensor:
        """Return the dense memory of a deferred tensor; if the operator writes into it, record the tensor in `by_value`."""
        if id(tensor) not in targets:
            return _read_dense(tensor)
        value = _writable(tensor)
        by_value[id(value)] = tensor
        return value

    result = func(*_map_deferred(args, get), **_map_deferred(kwargs, get))
    for tensor in by_value.values():
        torch.autograd.graph.increment_version(tensor._cell.read())
    return pytree.tree_map_only(Tensor, lambda value: by_value.get(id(value), value), result)


def _refuse_reshaped(tensor: DeferredTensor, func: Any) -> None:
    """Raise `TransposedOutputError` before `func` writes to a tensor that, or whose base, was reshaped in place after views.

    Autograd records a write to a view of a wrapper by viewing the base again, and the base has other strides now.
    """
    candidates = [value for value in (tensor, tensor._base) if isinstance(value, DeferredTensor)]
    if torch.is_grad_enabled() and any(value._is_reshaped_after_views for value in candidates):
        raise TransposedOutputError(
            f"{func} writes to a lazy output, which is computed when it is first used",
            found="its shape was changed in place before, after views of it had been taken",
            do='use `transpose` or `squeeze` out of place, or compile with outputs="dense"',
        )


def _run_inplace_view(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an in-place view, such as `transpose_`, on a deferred tensor, and return the tensor.

    It runs twice: on an alias of the dense memory, which becomes the value of the tensor's new cell, and without dispatch on the
    tensor itself, which changes its sizes and strides.
    """
    tensor, *rest = args
    if func is not aten.detach_.default:  # which changes neither
        value = _writable(tensor).detach()
        func(value, *rest, **kwargs)
        with no_dispatch():
            func(*args, **kwargs)
        tensor._cell = Cell(value, step=DeferredOperator(func, (tensor._cell, *rest), kwargs), value=value, is_view=True)
        tensor._is_reshaped_after_views = tensor.requires_grad and tensor._has_views
    return tensor
