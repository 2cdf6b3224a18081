"""Run a model without side effects: its state is restored afterwards, and fake tensors replace its inputs.

A *model* is a module, or any callable that reaches modules: `partial(model)`, `trainer.loss`, `lambda: model(x)`.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import RLock
from types import FunctionType, MethodType, ModuleType
from typing import Any, ParamSpec, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn

from streamfx.torch_private import (
    FakeTensor,
    FakeTensorMode,
    fake_copies,
    is_traceable_wrapper_subclass,
    real_values,
    rewrap,
    tree_iter,
    tree_map,
)
from streamfx.torch_private.dynamo import unwrap_compiled

WRAPPED = (FunctionType, MethodType, functools.partial)
P = ParamSpec("P")
R = TypeVar("R")
_lock = RLock()  # reentrant: a plan calls `explain`
ENABLED = "_is_of_streamfx"  # attribute of the wrapper that `enable` sets as a module's forward


def serialized(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that only one thread at a time runs any function wrapped this way: those that trace models.

    A model's tensors, torch's settings and Dynamo's cache belong to the process, not to a thread.
    """

    @functools.wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function while holding the lock."""
        with _lock:
            return function(*args, **kwargs)

    return locked


def original(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return the module or function inside of all `torch.compile` wrappers."""
    while (unwrapped := unwrap_compiled(model)) is not None:
        model = unwrapped
    return model


def modules_of(model: Callable[..., Any]) -> list[nn.Module]:
    """Return the modules that a callable is, holds, closes over or names: `model`, `partial(model)`, `trainer.loss`,
    `lambda: model(x)`.
    """
    roots = [
        module
        for value in _reachable_values(model)
        for module in ([value] if isinstance(value, nn.Module) else _modules_in(value))
    ]
    return list(dict.fromkeys(part for module in roots for part in module.modules()))


def parameters_of(model: Callable[..., Any]) -> dict[str, nn.Parameter]:
    """Return the parameters of the modules that a callable reaches, by name.

    If it reaches several modules that are not parts of each other, names begin with their class: `Actor.weight`, and
    `Actor(2).weight` for the second module of a class.
    """
    if isinstance(model, nn.Module):
        return dict(model.named_parameters())
    modules = modules_of(model)
    submodule_ids = {id(part) for module in modules for part in module.modules() if part is not module}
    roots = [cast(nn.Module, original(module)) for module in modules if id(module) not in submodule_ids]
    parameters: dict[str, nn.Parameter] = {}
    class_counts = Counter[str]()
    for root in roots:
        class_name = type(root).__name__
        class_counts[class_name] += 1
        number = f"({class_counts[class_name]})" if class_counts[class_name] > 1 else ""
        prefix = f"{class_name}{number}." if len(roots) > 1 else ""
        parameters |= {f"{prefix}{name}": parameter for name, parameter in root.named_parameters()}
    return parameters


def _reachable_values(function: Any, visited: tuple[Any, ...] = ()) -> list[Any]:
    """Return the values that a function can reach: itself, its `self`, closure cells, globals it names, bound arguments.

    Also those of functions that it closes over, such as a decorated one, except functions in `visited`.
    """
    if isinstance(function, functools.partial):
        bound = [*function.args, *function.keywords.values()]
        return [*_reachable_values(function.func, visited), *bound]
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_filled(cell)]
    names, global_names = getattr(getattr(function, "__code__", None), "co_names", ()), getattr(function, "__globals__", {})
    visited = (*visited, function)
    inner_functions = [
        cell for cell in cells if isinstance(cell, WRAPPED) and all(cell is not visited_function for visited_function in visited)
    ]
    inner_values = [value for cell in inner_functions for value in _reachable_values(cell, visited)]
    return [
        function,
        getattr(function, "__self__", None),
        *cells,
        *(global_names[name] for name in names if name in global_names),
        *inner_values,
    ]


def _modules_in(value: Any) -> list[nn.Module]:
    """Return the modules among the items of a container, or the attributes of any other object, not deeper."""
    if isinstance(value, (list, tuple, dict)):
        values = list(value.values()) if isinstance(value, dict) else list(value)
    else:
        values = list(vars(value).values()) if hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType)) else []
    return [item for item in values if isinstance(item, nn.Module)]


def held_tensors(module: nn.Module) -> list[Tensor]:
    """Return a module's own parameters and buffers, without those of its submodules."""
    return [tensor for by_name in (module._parameters, module._buffers) for tensor in by_name.values() if tensor is not None]


def _is_filled(cell: Any) -> bool:
    """Return whether a closure cell holds a value."""
    try:
        return cell.cell_contents is not None
    except ValueError:  # the variable is not assigned yet
        return False


@contextmanager
def without_side_effects(model: Callable[..., Any]) -> Iterator[None]:
    """Context manager: on exit, undo assignments to modules' attributes, writes to buffers, and random draws.

    In the block, the model's own forward runs, even if `streamfx.enable` or `model.compile()` has replaced it.
    """
    modules = modules_of(model)
    saved = [(module, _attributes(module)) for module in modules]
    with restored_randomness(), restored_buffers(modules):
        try:
            for module in modules:
                _unwrap_forward(module)
            yield
        finally:
            for module, attributes in saved:
                _restore(module.__dict__, attributes)


def _unwrap_forward(module: nn.Module) -> None:
    """Remove the wrappers that `model.compile()` or `enable` put around a module's forward."""
    module._compiled_call_impl = None
    forward: Any = module.__dict__.get("forward")
    if hasattr(forward, ENABLED):
        module.__dict__["forward"] = forward.__wrapped__


@contextmanager
def restored_buffers(modules: list[nn.Module]) -> Iterator[None]:
    """Context manager: on exit, restore the contents of the modules' buffers that hold data."""
    buffers = {id(buffer): buffer for module in modules for buffer in module._buffers.values() if _has_data(buffer)}
    with real_values():
        saved = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]
    try:
        yield
    finally:
        with real_values(), torch.no_grad():
            for buffer, value in saved:
                if not torch.equal(buffer, value):  # compiled code may write without incrementing the version
                    buffer.copy_(value)


@contextmanager
def without_gradients(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Context manager: the leaves among these tensors have no `.grad` in the block, and their old one after it."""
    saved = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf]
    for tensor, _ in saved:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in saved:
            tensor.grad = gradient


@contextmanager
def restored_randomness() -> Iterator[None]:
    """Context manager: on exit, restore the random generators of torch (CPU and CUDA), Python, and numpy if it is imported."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    cpu_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.set_rng_state(cpu_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)
        if numpy:
            numpy.random.set_state(numpy_state)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes for `_restore`: name -> (value, shallow copy of the value if it is a container, else None)."""
    containers = (dict, OrderedDict, list, set)
    return {name: (value, value.copy() if type(value) in containers else None) for name, value in module.__dict__.items()}


def _restore(attributes: dict[str, Any], saved: dict[str, Any]) -> None:
    """Restore a module's `__dict__`, in place, and the contents of containers in it; `saved`: the result of `_attributes`."""
    attributes.clear()
    for name, (value, container_copy) in saved.items():
        attributes[name] = value
        if container_copy is not None:
            value.clear()
            value.extend(container_copy) if isinstance(value, list) else value.update(container_copy)


class FakeConverter:
    """Converts real tensors to fake tensors of a mode, and always the same tensor to the same fake one.

    Tensors on the meta device become fake tensors on `device`.
    """

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self.mode, self.device = mode, device
        self._converted: dict[int, tuple[Tensor, Tensor]] = {}

    def fake(self, tensor: Tensor) -> Tensor:
        """Return the fake tensor of a tensor; packed weights and fake tensors are returned as they are."""
        if isinstance(tensor, FakeTensor) or has_packed_state(tensor):
            return tensor
        if id(tensor) not in self._converted:
            self._converted[id(tensor)] = tensor, self._make_fake(tensor)  # keep the original alive, so that its id is not reused
        return self._converted[id(tensor)][1]

    def _make_fake(self, tensor: Tensor) -> Tensor:
        """Return a new fake tensor like a real or meta one, a parameter if that is one, with its `mark_dynamic` flags."""
        if tensor.is_meta:
            fake = self._on_device(tensor).requires_grad_(tensor.requires_grad)
            fake = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
        else:
            fake = self.mode.from_tensor(tensor, static_shapes=True)
        for name, value in vars(tensor).items():  # `mark_dynamic` flags
            if name.startswith("_dynamo"):
                setattr(fake, name, value)
        return fake

    def _on_device(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor on `self.device` like one on the meta device.

        For a wrapper subclass (a sharded tensor), return a wrapper around fake inner tensors.
        """
        if is_traceable_wrapper_subclass(tensor):
            return rewrap(tensor.detach(), self._on_device)
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)

    def inputs(self, values: Any, with_integers: bool = False) -> Any:
        """Return a deep copy of nested arguments in which tensors are fake.

        `with_integers`: tensors of integers and booleans become real copies instead, so that code can read their data. If the
        arguments cannot be copied, objects in them are shared, and only tensors in containers are replaced.
        """
        memo = {}
        for tensor in (value for value in tree_iter(values) if isinstance(value, Tensor)):
            if with_integers and _has_data(tensor) and not tensor.is_floating_point() and not tensor.is_complex():
                with real_values():  # even in a fake mode
                    memo[id(tensor)] = tensor.clone()
            else:
                memo[id(tensor)] = self.fake(tensor)
        try:
            with fake_copies(self.mode):
                return copy.deepcopy(values, memo)
        except Exception:  # some object cannot be copied: share it, and replace the tensors that are reachable
            return tree_map(lambda value: memo.get(id(value), value), values)

    def replace(self, modules: list[nn.Module], buffers: bool) -> None:
        """Replace the parameters of modules by fake tensors, and their buffers if `buffers` is set or they have no data."""
        for module in modules:
            for name, parameter in module._parameters.items():
                module._parameters[name] = None if parameter is None else self.fake(parameter)  # type: ignore[assignment]
            for name, buffer in module._buffers.items():
                if buffer is not None and (buffers or buffer.is_meta):
                    module._buffers[name] = self.fake(buffer)


def has_packed_state(tensor: Tensor) -> bool:
    """Return whether a tensor's class holds state that a fake tensor would lose, as packed weights hold their scales."""
    is_plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
    return _has_data(tensor) and not is_plain and not is_traceable_wrapper_subclass(tensor)


def _has_data(tensor: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether a tensor is real: neither fake nor on the meta device."""
    return tensor is not None and not isinstance(tensor, FakeTensor) and not tensor.is_meta


def device_of(tensors: list[Tensor]) -> torch.device:
    """Return the device of the first tensor that is not on the meta device."""
    return next((tensor.device for tensor in tensors if tensor.device.type != "meta"), torch.device("cpu"))
