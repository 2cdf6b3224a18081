"""Decide which operators on deferred tensors are deferred, and build the cells of their results.

Views and casts are always deferred. So is any pure function with a large operand or result. A loss on deferred logits, and
autograd's formulas for its gradient, thus become one expression. Only small results of the expression are read, and they are
computed in chunks of the sequence (see `streamed.py`).

A *cell* (`lazy_values.py`) holds the value of a deferred tensor, or its *step*: the operator and the operand cells from which
it is computed. `like` has its metadata. The *root* of a view is the cell that owns the memory. A value is *wide* if it is large
and not computed yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from streamfx.ir.joint import walk
from streamfx.lazy.lazy_values import Cell, CellRows, DeferredOperator

aten = torch.ops.aten
MIN_NUMEL = 1 << 21  # elements of a large value, whose functions are deferred
MAX_DEPTH = 100  # operators on a path of an expression, because traversals are recursive
SMALL_RATIO = 8  # a value is small if it has this many times fewer elements than the widest one; small operands are copied

IMPURE = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def is_wide(cell: Cell) -> bool:
    """Return whether a value is large (`MIN_NUMEL` elements or more), and neither it nor the memory of its root exists."""
    return cell.value is None and not cell.is_materialized and cell.numel >= MIN_NUMEL


def widest_below(cell: Cell) -> int:
    """Return the number of elements of the largest wide value that reading a cell would compute; 0 if it computes no wide value.

    A wide value is large and not computed yet. Operands are visited, and their operands, until values that exist.
    """
    operands = walk(_operands_to_read(cell), _operands_to_read)
    return max((operand.numel for operand in operands if is_wide(operand)), default=0)


def _operands_to_read(cell: Cell) -> list[Cell]:
    """Return the operand cells that a cell must read to compute its value; none if it exists, or can do without them.

    A view does without its operand if the memory of its root exists, or if its rows can be computed without the rest.
    """
    step = cell.step  # before the value: see NOTE [Cells that several threads read]
    is_computed = cell.value is not None or (cell.root is not cell and (cell.is_materialized or cell.has_rows()))
    return [] if is_computed or step is None else step.operands()


def is_small_part(cell: Cell) -> bool:
    """Return whether a value has at most 1/8 of the elements of a wide value that reading it would compute."""
    return 0 < SMALL_RATIO * cell.numel <= widest_below(cell)


def is_small_view(cell: Cell) -> bool:
    """Return whether a value is a view with at most 1/8 of the elements of its root, which is large and not computed yet."""
    return cell.root is not cell and is_wide(cell.root) and SMALL_RATIO * cell.numel <= cell.root.numel


# -- views and casts


def view_cells(func: Any, cell: Cell, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Cell | list[Cell]:
    """Return the cell of a view of a deferred tensor, or a list of cells if the view operator `func` returns several views.

    `cell` is the tensor's, `args` are the other arguments. If the tensor's memory exists, the views are taken of it; otherwise
    only their metadata is computed, except for `as_strided`, which needs the memory.
    """
    step = DeferredOperator(func, (cell, *args), kwargs)
    on_metadata = not cell.is_materialized and func is not aten.as_strided.default
    views = func(meta_of(cell.like) if on_metadata else cell.aliased(), *args, **kwargs)
    if not isinstance(views, Tensor):
        return [_view_cell(view, step, index) for index, view in enumerate(views)]
    return _view_cell(views, step, None, _selected_rows(func, cell, args))


def _view_cell(view: Tensor, step: DeferredOperator, result: int | None, rows: CellRows | None = None) -> Cell:
    """Return the cell of a view, the result `result` of `step` (None if the operator returns one view).

    `view` is the view itself, or a meta tensor if it is not computed. `rows` are the index ranges of the root that it selects, if
    it does nothing else.
    """
    value, spreads = None if view.is_meta else view, step.operands()[0].spreads
    return Cell(view, step=step, result=result, value=value, rows=rows, is_view=True, spreads=spreads)


def _selected_rows(func: Any, cell: Cell, args: Sequence[Any]) -> CellRows | None:
    """Return the index ranges of the root's dimensions that a view `func` of `cell` selects; None if it does more than that.

    x[2:4] selects indices 2 and 3 of dimension 0. `args` are the arguments of the view after the tensor.
    """
    rows = cell.rows if cell.root is not cell else CellRows(tuple(cell.like.shape), {})
    if rows is None or func in (aten.alias.default, aten.detach.default):
        return rows
    if func is aten.select.int:
        return rows.narrow(args[0] % cell.like.dim(), args[1])
    if func is aten.slice.Tensor:
        dim, start, stop, step = tuple(args) + (0, None, None, 1)[len(args) :]
        return rows.narrow(dim % cell.like.dim(), slice(start, stop, step))
    return None


def is_lazy_cast(func: Any, cell: Cell, kwargs: Mapping[str, Any], device: torch.device) -> bool:
    """Return whether `func` copies a value that does not exist yet, and changes only its dtype, on the same device."""
    options = {name for name, value in kwargs.items() if value not in (None, False)}
    same_device = kwargs.get("device") in (None, device)
    is_cast = func is aten._to_copy.default and options <= {"dtype", "device", "layout", "memory_format"}
    return is_cast and same_device and cell.value is None


def cast(func: Any, cell: Cell, kwargs: Mapping[str, Any]) -> Cell:
    """Return the cell of a deferred change of dtype (`func` is `_to_copy`) of a cell's value."""
    kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    return Cell(func(meta_of(cell.like), **kwargs), step=DeferredOperator(func, (cell,), kwargs))


# -- all other operators


def defer_function(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> list[Cell] | None:
    """Return a cell for each result of an operator, if it is worthwhile to defer it; None if it has to run now.

    The arguments contain cells in place of deferred tensors. It is worthwhile if an operand is large and not computed yet, or if
    an operand `spreads` (is a gradient of a small part of such a value) and a result is large. The operator must be pure; plain
    tensors among its operands must be small, and are copied.
    """
    operands = [item for item in pytree.tree_leaves((args, dict(kwargs))) if isinstance(item, Cell)]
    widest = max((cell.numel for cell in operands if is_wide(cell)), default=0)
    if not (widest or any(cell.spreads for cell in operands)) or not _is_function(func, kwargs, device):
        return None
    if max(cell.depth for cell in operands) > MAX_DEPTH:
        return None
    try:
        metas = _result_metas(func, args, kwargs)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):  # the operator itself raises this later
        return None
    if not metas or any(like is None for like in metas):  # a gradient that is not requested
        return None
    if (widest := max(widest, *(like.numel() for like in metas))) < MIN_NUMEL:
        return None
    small_copies = [
        _small_copy(item, widest // SMALL_RATIO) for item in pytree.tree_leaves((args, dict(kwargs))) if _is_dense(item)
    ]
    if any(item is None for item in small_copies):
        return None
    copies = iter(small_copies)
    step = DeferredOperator(func, *pytree.tree_map_only(_is_dense, lambda item: next(copies), (tuple(args), dict(kwargs))))
    has_several = len(func._schema.returns) > 1
    return [Cell(like, step=step, result=index if has_several else None) for index, like in enumerate(metas)]


def defer_write(func: Any, cell: Cell, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> bool:
    """Defer an in-place operator: x.div_(y) changes the cell of x from its old step to div(old value, y).

    `cell` is the written value's; `args` are the other arguments, with cells in place of deferred tensors. Return whether it was
    deferred: the value must be large and not computed yet, and no other cell may have yet to read the old value.
    """
    function = _function_of(func)
    others = [item for item in pytree.tree_leaves((args, dict(kwargs))) if isinstance(item, Cell) and item is not cell]
    if function is None or not is_wide(cell) or any(other.root is cell for other in others):
        return False
    previous = cell.cell_before_write()
    if previous is None:
        return False
    args, kwargs = pytree.tree_map(lambda item: previous if item is cell else item, (tuple(args), dict(kwargs)))
    cells = defer_function(function, (previous, *args), kwargs, device)
    if cells is None or len(cells) != 1 or (cells[0].like.dtype, cells[0].like.shape) != (cell.like.dtype, cell.like.shape):
        return False
    assert cells[0].step is not None
    cell.write(cells[0].step)
    return True


def written_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes into, by its schema; lists are flattened."""
    written: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written.extend(pytree.tree_leaves(value))
    return written


def _function_of(func: Any) -> Any:
    """Return the functional form of an in-place operator, aten.div_.Tensor -> aten.div.Tensor; None if it has none.

    Also None if it writes to any argument but the first.
    """
    namespace, _, name = func._schema.name.partition("::")
    written = [i for i, argument in enumerate(func._schema.arguments) if argument.alias_info and argument.alias_info.is_write]
    if namespace != "aten" or not name.endswith("_") or written != [0]:
        return None
    return getattr(getattr(aten, name[:-1], None), func._overloadname, None)


def _is_function(func: Any, kwargs: Mapping[str, Any], device: torch.device) -> bool:
    """Return whether an operator is a pure function (no writes, no random draws, result shapes that do not depend on data).

    It must also return tensors only, and stay on the device of the deferred tensor.
    """
    tensors = all(str(result.type) == "Tensor" for result in func._schema.returns)
    impure = any(tag in func.tags for tag in IMPURE) and func is not aten.index.Tensor  # for mask indices, `_result_metas` fails
    pure = not func._schema.is_mutable and not impure
    return tensors and pure and kwargs.get("device") in (None, device)


def _is_dense(item: Any) -> bool:
    return isinstance(item, Tensor)


def _small_copy(tensor: Tensor, max_numel: int) -> Tensor | None:
    """Return a copy of an operand, whose expanded dimensions (stride 0) take no memory, so that later writes do not affect it.

    None if it has more than `max_numel` elements without these dimensions, or is not a plain tensor.
    """
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return None
    compact = compacted(tensor.detach())
    return compact.clone().expand(tensor.shape) if compact.numel() <= max_numel else None


def compacted(tensor: Tensor) -> Tensor:
    """Return a view of the tensor with size 1 in expanded dimensions (stride 0): sizes (8, 1000), strides (1, 0) -> (8, 1)."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        tensor = tensor.narrow(dim, 0, 1) if size > 1 and not stride else tensor
    return tensor


def _result_metas(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return meta tensors with the metadata of an operator's results, by running it on meta tensors.

    An error that the operator raises on them passes to the caller.
    """
    on_meta = {"device": torch.device("meta")} if kwargs.get("device") is not None else {}  # replaces the `device` of a factory
    args, kwargs = pytree.tree_map(_meta_operand, (tuple(args), dict(kwargs)))
    results = func(*args, **{**kwargs, **on_meta})
    return [results] if isinstance(results, Tensor) else list(results)


def _meta_operand(item: Any) -> Any:
    """Return a meta tensor in place of a cell or tensor; a zero-dimensional tensor, or any other argument, stays as it is."""
    if isinstance(item, Cell):
        return meta_of(item.like)
    return meta_of(item) if isinstance(item, Tensor) and item.dim() else item


def meta_of(tensor: Tensor) -> Tensor:
    """Return a meta tensor with the sizes, strides and dtype of a tensor."""
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
