"""A tensor that is computed when it is touched.

To the outside it is the dense tensor: sizes, strides, type, device, `requires_grad` and `grad_fn` are real. Its history
is one autograd node that leads to the tensors it is rebuilt from, so all that autograd does with a tensor (hooks,
`retain_grad`, in-place operators, views, custom functions) works on it as it stands. Below autograd, in
`__torch_dispatch__`, an operator is run on the dense values of its operands; views and casts stay deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch
from torch.utils import _pytree as pytree

from streamfx.runtime.cells import Cell, Rows
from streamfx.runtime.rebuild import Source
from streamfx.torch_private import (
    DISABLED_TORCH_FUNCTION,
    is_composite,
    no_dispatch,
    no_modes,
    untraced,
    wrapper_tensor,
)

aten = torch.ops.aten
_data: Any = Tensor.data


class DeferredTensor(Tensor):
    """Looks and behaves like the dense tensor, and is computed when its values are needed."""

    _cell: Cell
    _traced: bool  # made by a compiler's tracing, which sees plain tensors only

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
        plain: Tensor = Dense.apply(self) if self.requires_grad else _settled(self)
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
        return self.detach()

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


class Dense(torch.autograd.Function):
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
    def forward(ctx: Any, source: Source, like: Tensor, *values: Any) -> Tensor:
        ctx.source = source
        ctx.set_materialize_grads(False)
        return DeferredTensor(Cell(like, source), source.recipe.device)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[override]
    @untraced
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        if gradient is None:
            return (None,) * (2 + len(ctx.source.recipe.program.given))
        return (None, None, *ctx.source.gradients(gradient))


def deferred(source: Source, like: Tensor, values: Sequence[Any]) -> Tensor:
    """A tensor with the sizes of `like`, a meta tensor, that is rebuilt from `values` when touched."""
    if source.differentiable:
        return DeferredOutput.apply(source, like, *values)
    return DeferredTensor(Cell(like, source), source.recipe.device)


# -- operators


def _settled(tensor: DeferredTensor) -> Tensor:
    """A new plain tensor over the shared memory."""
    return tensor._cell.writable().detach()


def _dispatched(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if is_composite(func):  # inference mode shows us operators that are otherwise taken apart before
        return func.decompose(*args, **kwargs)
    tensor = next((item for item in args if isinstance(item, DeferredTensor)), None)
    if torch.Tag.inplace_view in func.tags:
        return _reshaped(func, args, kwargs)
    if func._schema.is_mutable:
        return _written(func, args, kwargs)
    if tensor is not None and not tensor._traced:
        if _is_view(func):
            return _viewed(func, tensor, args, kwargs)
        if func is aten._to_copy.default and _is_lazy_cast(tensor, kwargs):
            return _cast(func, tensor, kwargs)
    return func(*_plain(args, _read), **_plain(kwargs, _read))


def _read(tensor: DeferredTensor) -> Tensor:
    with enable_reentrant_dispatch():  # a recipe runs under the modes of its call, not under ours
        return tensor._cell.read()


def _aliased(tensor: DeferredTensor) -> Tensor:
    with enable_reentrant_dispatch():
        return tensor._cell.aliased()


def _writable(tensor: DeferredTensor) -> Tensor:
    with enable_reentrant_dispatch():
        return tensor._cell.writable()


def _plain(values: Any, get: Callable[[DeferredTensor], Tensor]) -> Any:
    return pytree.tree_map_only(DeferredTensor, get, values)


def _is_view(func: Any) -> bool:
    """Whether a result is part of an operand's memory."""
    return any(result.alias_info is not None for result in func._schema.returns)


def _viewed(func: Any, tensor: DeferredTensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Views of a deferred tensor are deferred (see NOTE [Memory shared by views])."""
    cell, rest = tensor._cell, tuple(args[1:])
    parts = func(cell.like if func in ON_COPIES and not cell.is_whole else _aliased(tensor), *rest, **kwargs)
    if not isinstance(parts, Tensor):
        return [_view(tensor, part, _Step(func, rest, kwargs, number)) for number, part in enumerate(parts)]
    return _view(tensor, parts, _Step(func, rest, kwargs), _rows(func, tensor, rest))


def _view(tensor: DeferredTensor, part: Tensor, step: _Step, rows: Rows | None = None) -> DeferredTensor:
    value = None if part.is_meta else part
    return DeferredTensor(Cell(part, base=tensor._cell, step=step, value=value, rows=rows, is_view=True), tensor.device)


@dataclass(frozen=True)
class _Step:
    """A view, or a cast, to be taken later."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: int | None = None

    def __call__(self, value: Tensor) -> Tensor:
        made = self.func(value, *self.args, **self.kwargs)
        part: Tensor = made if self.result is None else made[self.result]
        return part


# Views that are also right on a copy of some rows, whose strides may be others.
ON_COPIES = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.dim,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
    }
)


def _rows(func: Any, tensor: DeferredTensor, rest: tuple[Any, ...]) -> Rows | None:
    """Which rows of the root a view is, where it is no more than that."""
    cell = tensor._cell
    rows = cell.rows if cell.root is not cell else Rows(tuple(tensor.shape), {})
    if rows is None or func in (aten.alias.default, aten.detach.default):
        return rows
    if func is aten.select.int:
        return rows.narrowed(rest[0] % tensor.dim(), rest[1])
    if func is aten.slice.Tensor:
        dim, start, stop, step = rest + (0, None, None, 1)[len(rest) :]
        return rows.narrowed(dim % tensor.dim(), slice(start, stop, step))
    return None


def _is_lazy_cast(tensor: DeferredTensor, kwargs: Mapping[str, Any]) -> bool:
    """Whether a copy changes the type only, of a value that is not there yet."""
    given = {name for name, value in kwargs.items() if value not in (None, False)}
    same_device = kwargs.get("device") in (None, tensor.device)
    return tensor._cell.value is None and same_device and given <= {"dtype", "device", "layout", "memory_format"}


def _cast(func: Any, tensor: DeferredTensor, kwargs: Mapping[str, Any]) -> DeferredTensor:
    options = {name: value for name, value in kwargs.items() if name != "device"}
    like = func(tensor._cell.like, **options)
    return DeferredTensor(Cell(like, base=tensor._cell, step=_Step(func, (), options)), tensor.device)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Operators that write: into the shared memory. What they return is the tensor that they were given."""
    given: dict[int, DeferredTensor] = {}
    targets = {id(value): value for value in _written_values(func, args, kwargs) if isinstance(value, DeferredTensor)}

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
        tensor._cell = Cell(value, base=tensor._cell, value=value, is_view=True)
    return tensor
