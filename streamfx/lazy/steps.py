"""Which operators on deferred tensors wait, and the cells of what they will give.

Views and casts always wait. So does any operator that is a function of its operands, where an operand or its result is large:
what it gives is deferred again. A loss on deferred logits, and autograd's formulas for its gradient, so become one expression, of
which only small results are ever asked for: these are made along the sequence (see `streamed.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from streamfx.lazy.lazy_values import Cell, CellRows, DeferredOperator

aten = torch.ops.aten
LEAST = 1 << 21  # elements of a value that is worth an expression
DEEPEST = 100  # steps in an expression, one on the other: walks through it are recursive
SMALL = 8  # times smaller than what it is used with: a copy of an operand is kept, in case the caller writes into it

IMPURE = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def is_wide(cell: Cell) -> bool:
    """Whether a value is large and not there yet."""
    return cell.value is None and not cell.is_whole and cell.numel >= LEAST


def widest_below(cell: Cell) -> int:
    """Elements of the largest value, not there yet, that reading a cell would make on the way; 0 if no such value is large."""
    seen, waiting, widest = {cell}, [cell], 0
    while waiting:
        for operand in _asked_for(waiting.pop()):
            if operand not in seen:
                seen.add(operand)
                waiting.append(operand)
                widest = max(widest, operand.numel if is_wide(operand) else 0)
    return widest


def _asked_for(cell: Cell) -> list[Cell]:
    """The operands that a cell has to read for its value."""
    step = cell.step  # before the value: see NOTE [Cells that several threads read]
    is_there = cell.value is not None or (cell.root is not cell and (cell.is_whole or cell.has_rows()))
    return [] if is_there or step is None else step.operands()


def is_part(cell: Cell) -> bool:
    """Whether a value is small beside others that reading it would make."""
    return 0 < SMALL * cell.numel <= widest_below(cell)


def is_cut_from(cell: Cell) -> bool:
    """Whether a value is a small view of a large one that is not there."""
    return cell.root is not cell and is_wide(cell.root) and SMALL * cell.numel <= cell.root.numel


# -- views and casts


def viewed(func: Any, cell: Cell, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Cell | list[Cell]:
    """Views of a deferred tensor are deferred (see NOTE [Memory shared by views]). `args` are those after the tensor."""
    step = DeferredOperator(func, (cell, *args), kwargs)
    on_metadata = not cell.is_whole and func is not aten.as_strided.default
    parts = func(meta_of(cell.like) if on_metadata else cell.aliased(), *args, **kwargs)
    if not isinstance(parts, Tensor):
        return [_part(part, step, number) for number, part in enumerate(parts)]
    return _part(parts, step, None, _rows(func, cell, args))


def _part(part: Tensor, step: DeferredOperator, result: int | None, rows: CellRows | None = None) -> Cell:
    value, spreads = None if part.is_meta else part, step.operands()[0].spreads
    return Cell(part, step=step, result=result, value=value, rows=rows, is_view=True, spreads=spreads)


def _rows(func: Any, cell: Cell, args: Sequence[Any]) -> CellRows | None:
    """Which rows of the root a view is, where it is no more than that."""
    rows = cell.rows if cell.root is not cell else CellRows(tuple(cell.like.shape), {})
    if rows is None or func in (aten.alias.default, aten.detach.default):
        return rows
    if func is aten.select.int:
        return rows.narrowed(args[0] % cell.like.dim(), args[1])
    if func is aten.slice.Tensor:
        dim, start, stop, step = tuple(args) + (0, None, None, 1)[len(args) :]
        return rows.narrowed(dim % cell.like.dim(), slice(start, stop, step))
    return None


def is_lazy_cast(func: Any, cell: Cell, kwargs: Mapping[str, Any], device: torch.device) -> bool:
    """Whether a copy changes the type only, of a value that is not there yet."""
    given = {name for name, value in kwargs.items() if value not in (None, False)}
    same_device = kwargs.get("device") in (None, device)
    is_cast = func is aten._to_copy.default and given <= {"dtype", "device", "layout", "memory_format"}
    return is_cast and same_device and cell.value is None


def cast(func: Any, cell: Cell, kwargs: Mapping[str, Any]) -> Cell:
    kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    return Cell(func(meta_of(cell.like), **kwargs), step=DeferredOperator(func, (cell,), kwargs))


# -- all others


def postponed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> list[Cell] | None:
    """The results of a function of large deferred values, or large results of what `spreads`; None for any other operator.

    Cells stand in the arguments for deferred tensors.
    """
    operands = [item for item in pytree.tree_leaves((args, dict(kwargs))) if isinstance(item, Cell)]
    widest = max((cell.numel for cell in operands if is_wide(cell)), default=0)
    if not (widest or any(cell.spreads for cell in operands)) or not _is_function(func, kwargs, device):
        return None
    if max(cell.depth for cell in operands) > DEEPEST:
        return None
    try:
        likes = _likes(func, args, kwargs)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):  # the operator itself will tell
        return None
    if not likes or any(like is None for like in likes):  # a gradient that nobody asked for
        return None
    if (widest := max(widest, *(like.numel() for like in likes))) < LEAST:
        return None
    own = [_own(item, widest // SMALL) for item in pytree.tree_leaves((args, dict(kwargs))) if _is_dense(item)]
    if any(item is None for item in own):
        return None
    copies = iter(own)
    step = DeferredOperator(func, *pytree.tree_map_only(_is_dense, lambda item: next(copies), (tuple(args), dict(kwargs))))
    several = len(func._schema.returns) > 1
    return [Cell(like, step=step, result=number if several else None) for number, like in enumerate(likes)]


def overwritten(func: Any, cell: Cell, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> bool:
    """Let a large value that is not there be that of an operator which writes into it, if nothing else has seen it.

    `args` are those after the value, cells in place of deferred tensors.
    """
    function = _function_of(func)
    others = [item for item in pytree.tree_leaves((args, dict(kwargs))) if isinstance(item, Cell) and item is not cell]
    if function is None or not is_wide(cell) or any(other.root is cell for other in others):
        return False
    before = cell.before_a_write()
    if before is None:
        return False
    args, kwargs = pytree.tree_map(lambda item: before if item is cell else item, (tuple(args), dict(kwargs)))
    made = postponed(function, (before, *args), kwargs, device)
    if made is None or len(made) != 1 or (made[0].like.dtype, made[0].like.shape) != (cell.like.dtype, cell.like.shape):
        return False
    assert made[0].step is not None
    cell.write(made[0].step)
    return True


def _function_of(func: Any) -> Any:
    """`aten.div.Tensor` for `aten.div_.Tensor`; None where there is none, or more than the first argument is written."""
    namespace, _, name = func._schema.name.partition("::")
    written = [i for i, argument in enumerate(func._schema.arguments) if argument.alias_info and argument.alias_info.is_write]
    if namespace != "aten" or not name.endswith("_") or written != [0]:
        return None
    return getattr(getattr(aten, name[:-1], None), func._overloadname, None)


def _is_function(func: Any, kwargs: Mapping[str, Any], device: torch.device) -> bool:
    """Whether results follow from the operands, have memory of their own, and lie on the device of the deferred tensor."""
    tensors = all(str(result.type) == "Tensor" for result in func._schema.returns)
    impure = any(tag in func.tags for tag in IMPURE) and func is not aten.index.Tensor  # by a mask, `_likes` fails
    pure = not func._schema.is_mutable and not impure
    return tensors and pure and kwargs.get("device") in (None, device)


def _is_dense(item: Any) -> bool:
    return isinstance(item, Tensor)


def _own(tensor: Tensor, most: int) -> Tensor | None:
    """A copy of a small operand, which keeps what is repeated in it; None if it is large or no plain tensor."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return None
    compact = compacted(tensor.detach())
    return compact.clone().expand(tensor.shape) if compact.numel() <= most else None


def compacted(tensor: Tensor) -> Tensor:
    """The tensor without repetitions: of size 1 where it was expanded."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        tensor = tensor.narrow(dim, 0, 1) if size > 1 and not stride else tensor
    return tensor


def _likes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Meta tensors like the results."""
    on_meta = {"device": torch.device("meta")} if kwargs.get("device") is not None else {}
    args, kwargs = pytree.tree_map(_meta_operand, (tuple(args), dict(kwargs)))
    made = func(*args, **{**kwargs, **on_meta})
    return [made] if isinstance(made, Tensor) else list(made)


def _meta_operand(item: Any) -> Any:
    if isinstance(item, Cell):
        return meta_of(item.like)
    return meta_of(item) if isinstance(item, Tensor) and item.dim() else item


def meta_of(tensor: Tensor) -> Tensor:
    """A tensor without memory, with the same sizes and strides."""
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
