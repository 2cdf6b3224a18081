"""A tensor that is computed when it is touched.

To the outside it is the dense tensor: sizes, strides, type, device, `requires_grad` and `grad_fn` are real. Its history
is one autograd node that leads to the tensors it is rebuilt from, so all that autograd does with a tensor (hooks,
`retain_grad`, in-place operators, views, custom functions) works on it as it stands. Below autograd, in
`__torch_dispatch__`, views, casts and functions of large values stay deferred (`steps.py`); what is small is made along the
sequence (`streamed.py`); any other operator is run on the dense values of its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from streamfx.errors import TransposedOutputError
from streamfx.lazy.lazy_values import Cell, DeferredOperator
from streamfx.lazy.recompute import RecomputeSource
from streamfx.lazy.steps import cast, is_cut_from, is_lazy_cast, is_part, is_wide, overwritten, postponed, viewed
from streamfx.lazy.streamed import gradients_in_chunks, made_in_chunks
from streamfx.passes.ops.aliasing import is_view
from streamfx.torch_private import (
    DISABLED_TORCH_FUNCTION,
    is_composite,
    keeps_graph,
    no_dispatch,
    no_modes,
    reentrant_dispatch,
    untraced,
    wrapper_tensor,
)
from streamfx.torch_private.autograd import nodes_that_run

# NOTE [Gradients that spread]
# Autograd's formulas for `gather`, `max`, `topk`, an index or a slice make zeros of the operand's size out of the result's
# gradient, without the operand. So the gradient of a small part of a large deferred tensor is made a deferred tensor itself,
# right before the formula: what is made of it is deferred, too.

aten = torch.ops.aten
FREED = (
    "Trying to backward through the graph a second time: the first backward pass has freed what a deferred output follows from. "
    "Specify retain_graph=True if you need to backward through the graph a second time."
)
_data: Any = Tensor.data


class DeferredTensor(Tensor):
    """Looks and behaves like the dense tensor, and is computed when its values are needed."""

    _cell: Cell
    _traced: bool  # made by a compiler's tracing, which sees plain tensors only
    _has_views = False  # views of it were taken
    _is_turned = False  # in place, after that, where autograd follows it
    _is_part = False  # small, of something large that is not there: see NOTE [Gradients that spread]

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
        """The same values as a plain tensor, in the memory that this tensor and its views share."""
        plain: Tensor = ToDense.apply(self) if self.requires_grad else _settled(self)
        return plain

    # -- what torch reads from memory itself, past all dispatch

    def __tensor_flatten__(self) -> tuple[list[str], tuple[()]]:
        return ["_memory"], ()

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> DeferredTensor:
        memory = inner["_memory"]
        return cls(Cell(memory, value=memory), memory.device, traced=True)

    @property
    @untraced
    def _memory(self) -> Tensor:
        with no_modes():  # a tracer asks under its own modes
            return self._cell.writable()

    @property
    def data(self) -> Tensor:
        """The same memory, with a version of its own: autograd does not see what is written to it."""
        shown = self.detach()
        return shown if self._traced or not isinstance(shown, DeferredTensor) else _tensor(shown._cell, self.device)

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


def _past_dispatch(name: str, get: Callable[[DeferredTensor], Tensor]) -> Callable[..., Any]:
    """A method that reads memory past all dispatch, called on the plain tensor that `get` gives."""
    plain = getattr(Tensor, name)

    @untraced
    def method(self: DeferredTensor, *args: Any, **kwargs: Any) -> Any:
        result = plain(self if self._traced else get(self), *args, **kwargs)
        return self if isinstance(result, Tensor) else result

    method.__name__ = name
    return method


# `untyped_storage` is not among them: compilers use it as the identity of a tensor's memory, without reading from it.
for _name in ("__array__", "__dlpack__", "numpy", "tolist"):  # these mind whether a gradient is required
    setattr(DeferredTensor, _name, _past_dispatch(_name, lambda tensor: tensor._dense()))
for _name in ("_typed_storage", "data_ptr", "is_shared", "share_memory_", "storage"):
    setattr(DeferredTensor, _name, _past_dispatch(_name, lambda tensor: tensor._memory))


class ToDense(torch.autograd.Function):
    """From a deferred tensor to a plain one."""

    @staticmethod
    def forward(ctx: Any, tensor: DeferredTensor) -> Tensor:
        return _settled(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class DeferredOutput(torch.autograd.Function):
    """From what a recipe reads to a deferred tensor."""

    @staticmethod
    def forward(ctx: Any, source: RecomputeSource, like: Tensor, *values: Any) -> Tensor:
        ctx.source, ctx.freed = source, frozenset()
        ctx.set_materialize_grads(False)
        return DeferredTensor(Cell(like, source), source.recipe.device)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[override]
    @untraced
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        if gradient is None:
            return (None,) * (2 + len(ctx.source.recipe.program.given))
        running = nodes_that_run(ctx.next_functions)
        if not ctx.freed.isdisjoint(running):
            raise RuntimeError(FREED)  # these would raise it, too, but after the head's weight has got a second gradient
        ctx.freed |= frozenset() if keeps_graph() else running
        return (None, None, *_gradients(ctx.source, gradient))


def _gradients(source: RecomputeSource, gradient: Tensor) -> Sequence[Tensor | None]:
    """The gradients of what a deferred tensor is made from, without the dense gradient of the tensor where that is deferred."""
    if isinstance(gradient, DeferredTensor) and is_wide(gradient._cell) and not source.is_rebuilt:
        found = gradients_in_chunks(source, gradient._cell)
        if found is not None:
            return _apart(found, gradient)
    # whoever is given these expects plain tensors: the hidden states' gradient waits, too, where that of the logits does
    found = [item._cell.read() if isinstance(item, DeferredTensor) else item for item in source.gradients(gradient)]
    return _apart(found, gradient)


def _apart(values: Iterable[Tensor | None], given: Tensor) -> list[Tensor | None]:
    """Each in memory of its own, or the very tensor that was given: autograd may add the next gradient into any other."""
    places, found = {_place(given)}, list[Tensor | None]()
    for value in values:
        place = None if value is given else _place(value)
        found.append(value.clone() if value is not None and place is not None and place in places else value)
        places.add(place)
    return found


def _place(value: Tensor | None) -> int | None:
    """Where a tensor's memory begins; None for one that has none, or none of its own."""
    return value.untyped_storage().data_ptr() if type(value) is Tensor and value.layout is torch.strided else None


def deferred(source: RecomputeSource, like: Tensor, values: Sequence[Any]) -> Tensor:
    """A tensor with the sizes of `like`, a meta tensor, that is rebuilt from `values` when touched."""
    if source.differentiable:
        tensor: DeferredTensor = DeferredOutput.apply(source, like, *values)
    else:
        tensor = DeferredTensor(Cell(like, source), source.recipe.device)
    if not source.waits:
        tensor._cell.read()
    return tensor


# -- operators


def _dispatched(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if is_composite(func):  # inference mode shows us operators that are otherwise taken apart before
        return func.decompose(*args, **kwargs)
    given = [item for item in pytree.tree_leaves((args, dict(kwargs))) if isinstance(item, DeferredTensor)]
    for tensor in given:
        _let_gradient_spread(tensor)
    if torch.Tag.inplace_view in func.tags:
        return _reshaped(func, args, kwargs)
    if func._schema.is_mutable:
        return _written(func, args, kwargs)
    if not any(tensor._traced for tensor in given):
        waiting = _waiting(func, args, kwargs, given)
        if waiting is not None:
            return waiting
    return func(*_plain(args, _read), **_plain(kwargs, _read))


def _waiting(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[DeferredTensor]) -> Any:
    """The results of an operator that waits; None for one that has to be run."""
    device = given[0].device
    args, kwargs = _plain(tuple(args), _cell_of), _plain(dict(kwargs), _cell_of)
    first = args[0] if args and isinstance(args[0], Cell) else None
    if first is not None and is_view(func):
        given[0]._has_views = True
        with reentrant_dispatch():
            parts = viewed(func, first, args[1:], kwargs)
        return [_tensor(part, device) for part in parts] if isinstance(parts, list) else _tensor(parts, device)
    if first is not None and is_lazy_cast(func, first, kwargs, device):
        return _tensor(cast(func, first, kwargs), device)
    cells = postponed(func, args, kwargs, device)
    if cells is None:
        return None
    results = [_tensor(cell, device) for cell in cells]
    if all(is_part(cell) for cell in cells):
        _make(cells)
        recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
        results = [tensor if recorded else tensor._cell.value for tensor in results]  # type: ignore[misc]
    return results[0] if len(func._schema.returns) == 1 else tuple(results)


def _tensor(cell: Cell, device: torch.device) -> DeferredTensor:
    tensor = DeferredTensor(cell, device)
    tensor._is_part = is_part(cell) or is_cut_from(cell)
    return tensor


def _let_gradient_spread(tensor: DeferredTensor) -> None:
    """See NOTE [Gradients that spread]; asked for when a tensor is used, since its `grad_fn` is not known when it is made."""
    if not tensor._is_part or not torch.is_grad_enabled():
        return
    with reentrant_dispatch():  # autograd writes the history of a view anew where its base has been written to
        made_by = tensor.grad_fn
    if made_by is not None:
        tensor._is_part = False
        made_by.register_prehook(_spreading)


def _spreading(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    def marked(gradient: Tensor) -> Tensor:
        own = gradient.detach().clone()  # read when the gradient of all is made: a hook may have written into this one by then
        return DeferredTensor(Cell(own, value=own, spreads=True), gradient.device)

    # one that has a history of its own (create_graph=True) has to keep it
    return tuple(marked(item) if type(item) is Tensor and not item.requires_grad else item for item in gradients)


def _make(cells: Sequence[Cell]) -> None:
    """Give cells their values; along the sequence, if that keeps the large ones away that they are made of."""
    with reentrant_dispatch():
        values = made_in_chunks(cells)
        for cell, value in zip(cells, values or (), strict=False):
            cell.keep(value)
        for cell in cells:
            cell.read()


def _cell_of(tensor: DeferredTensor) -> Cell:
    return tensor._cell


def _settled(tensor: DeferredTensor) -> Tensor:
    """A new plain tensor over the shared memory."""
    return tensor._cell.writable().detach()


def _read(tensor: DeferredTensor) -> Tensor:
    if is_part(tensor._cell):
        _make([tensor._cell])
    with reentrant_dispatch():  # a recipe runs under the modes of its call, not under ours
        return tensor._cell.read()


def _writable(tensor: DeferredTensor) -> Tensor:
    with reentrant_dispatch():
        return tensor._cell.writable()


def _plain(values: Any, get: Callable[[DeferredTensor], Any]) -> Any:
    return pytree.tree_map_only(DeferredTensor, get, values)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Operators that write: into the shared memory. What they return is the tensor that they were given."""
    targets = {id(value): value for value in _written_values(func, args, kwargs) if isinstance(value, DeferredTensor)}
    for value in targets.values():
        _refuse_turned(value, func)
    target, *rest = args if args and isinstance(args[0], DeferredTensor) else (None,)
    if target is not None and not target._traced and _overwritten(func, target, rest, kwargs):
        return target
    given: dict[int, DeferredTensor] = {}

    def get(tensor: DeferredTensor) -> Tensor:
        if id(tensor) not in targets:
            return _read(tensor)
        value = _writable(tensor)
        given[id(value)] = tensor
        return value

    result = func(*_plain(args, get), **_plain(kwargs, get))
    for tensor in given.values():
        torch.autograd.graph.increment_version(tensor._cell.read())
    return pytree.tree_map_only(Tensor, lambda value: given.get(id(value), value), result)


def _refuse_turned(tensor: DeferredTensor, func: Any) -> None:
    """Autograd follows a view of a wrapper by viewing its base again, which may lie otherwise by now; of memory it knows how the
    view lies there.
    """
    base = tensor if tensor._base is None else tensor._base
    if torch.is_grad_enabled() and any(isinstance(item, DeferredTensor) and item._is_turned for item in (tensor, base)):
        raise TransposedOutputError(
            f"{func} writes to an output that is computed when it is touched",
            found="it was turned in place before, and views of it had been taken before that",
            do='turn a copy (`transpose`, `squeeze`), or compile with outputs="dense"',
        )


def _overwritten(func: Any, target: DeferredTensor, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return overwritten(func, target._cell, _plain(tuple(rest), _cell_of), _plain(dict(kwargs), _cell_of), target.device)


def _written_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes into."""
    written: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written.extend(pytree.tree_leaves(value))
    return written


def _reshaped(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`transpose_` and its kin: other sizes for the same memory."""
    tensor, *rest = args
    if func is not aten.detach_.default:
        value = _writable(tensor).detach()
        func(value, *rest, **kwargs)
        with no_dispatch():
            func(*args, **kwargs)
        tensor._cell = Cell(value, step=DeferredOperator(func, (tensor._cell, *rest), kwargs), value=value, is_view=True)
        tensor._is_turned = tensor.requires_grad and tensor._has_views
    return tensor
