"""Find the repeated layers of a model, and whether a few of them can represent all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

from torch import Tensor, nn

from streamfx.cost.repeats import Repeat
from streamfx.tools.inspect.side_effect_guard import held_tensors, modules_of

List = nn.ModuleList | nn.ModuleDict | nn.Sequential
SETTING_TYPES = (bool, int, float, str, type(None))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def layers_of(model: Callable[..., Any]) -> list[nn.Module]:
    """Return the repeated layers of a model: the elements of its outermost module lists, the longest list first. A `Sequential`
    or a `ModuleDict` of similar modules counts as such a list.
    """
    return [layer for modules in sorted(_lists_of(model), key=len, reverse=True) for layer in _elements_of(modules)]


@contextmanager
def first_layers(model: Callable[..., Any], count: int) -> Iterator[None]:
    """Truncate each outermost module list of the model to its first `count` layers, in place, and restore it on exit."""
    lists = [module for module in _lists_of(model) if len(module) > count]
    saved = [module._modules for module in lists]
    for module in lists:
        module._modules = dict(list(module._modules.items())[:count])
    try:
        yield
    finally:
        for module, layers in zip(lists, saved, strict=True):
            module._modules = layers


def _lists_of(model: Callable[..., Any]) -> list[List]:
    """Return the outermost lists of layers of a model, in module order."""
    lists: list[List] = []
    nested: set[nn.Module] = set()
    for module in modules_of(model):
        if _is_list(module) and module not in nested:
            lists.append(module)
            nested.update(part for layer in _elements_of(module) for part in layer.modules())
    return lists


def _is_list(module: nn.Module) -> TypeGuard[List]:
    """Return whether a module is a list of layers: a `ModuleList`, or a `Sequential` or `ModuleDict` whose elements have the same
    class and have submodules. A container with a single element that contains lists itself is a wrapper, not a list.
    """
    if isinstance(module, nn.ModuleList):
        return True
    if not isinstance(module, (nn.Sequential, nn.ModuleDict)):
        return False
    layers = _elements_of(module)
    are_alike = len(layers) == len(module) > 0 and len({type(layer) for layer in layers}) == 1
    is_around = len(layers) == 1 and any(map(_is_list, layers[0].modules()))
    return are_alike and all(any(layer.children()) for layer in layers) and not is_around


def _elements_of(modules: List) -> list[nn.Module]:
    """Return the elements of a module list that define `forward`."""
    return [layer for layer in modules._modules.values() if layer is not None and has_forward(layer)]


def has_forward(module: nn.Module) -> bool:
    """Return whether a module defines `forward`. Containers and bare modules do not.

    >>> has_forward(nn.Linear(1, 1)), has_forward(nn.ModuleList()), has_forward(nn.Module())
    (True, False, False)
    """
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def is_torch_module(module: nn.Module) -> bool:
    """Return whether a module consists of PyTorch's own classes without hooks, so that its inputs determine its operators.

    >>> is_torch_module(nn.Linear(1, 1)), is_torch_module(type("Other", (nn.Linear,), {})(1, 1))
    (True, False)
    """
    return all(
        type(part).__module__.startswith("torch.nn.modules.")
        and "forward" not in vars(part)
        and not any(getattr(part, hooks) for hooks in HOOKS)
        for part in module.modules()
    )


def name_of_layers(model: Callable[..., Any]) -> str:
    """Return the name of the longest list of layers in the outermost module that contains it."""
    longest = max(_lists_of(model), key=len)
    return next(name for root in modules_of(model) for name, module in root.named_modules() if module is longest)


def find_repeat(model: Callable[..., Any], by_settings: bool = False) -> Repeat | None:
    """Find the layer repetition of a model from the modules and tensors its layers hold; `by_settings` also compares their plain
    attributes. None if the layers do not repeat, or if that saves little.

    The caller must check that the layers compute the same. The last layers that are kept correspond to the last layers of
    the full model.
    """
    lists = sorted(_lists_of(model), key=len)
    if not lists:
        return None
    layers = _elements_of(lists[-1])
    count, second_longest = len(layers), len(lists[-2]) if len(lists) > 1 else 0
    if not layers or count != len(lists[-1]) or not _share_no_tensors(model, layers):
        return None
    kinds: list[Any] = [[(name, *_description_of(module)) for name, module in layer.named_modules()] for layer in layers]
    if by_settings:
        kinds = list(zip(kinds, _settings(layers), strict=True))
    best = min(
        (_repeat_with_period(kinds, period) for period in range(1, count // 4 + 1)), key=lambda repeat: repeat.kept, default=None
    )
    return best if best is not None and second_longest <= best.kept <= count // 2 else None


def _repeat_with_period(kinds: Sequence[Any], period: int) -> Repeat:
    """Return the repetition of layers with this period, after the front layers, which differ."""
    count = len(kinds)
    changes = [i for i in range(count - period) if kinds[i] != kinds[i + period]]
    front = max(1, changes[-1] + 1 if changes else 0)
    fewest_kept = front + 2 * period + 1
    return Repeat(front, period, fewest_kept + (count - fewest_kept) % period, count)


def _share_no_tensors(model: Callable[..., Any], layers: Sequence[nn.Module]) -> bool:
    """Return whether each tensor of a layer is held in exactly one place."""
    holder_counts = Counter(id(tensor) for module in modules_of(model) for tensor in held_tensors(module))
    layer_counts = Counter(id(tensor) for layer in layers for module in layer.modules() for tensor in held_tensors(module))
    return all(holder_counts[tensor] == count == 1 for tensor, count in layer_counts.items())


def _description_of(module: nn.Module) -> tuple[Any, ...]:
    """Return the properties in which a module of equal layers agrees: its class, its hooks (by identity), and its tensors."""
    tensors = {**module._parameters, **module._buffers}
    descriptions = [(name, None if tensor is None else _tensor_description(tensor)) for name, tensor in tensors.items()]
    return type(module), module.training, [getattr(module, hooks) and id(module) for hooks in HOOKS], descriptions


def _settings(layers: Sequence[nn.Module]) -> list[dict[tuple[str, str], Any]]:
    """Return the plain attributes of each layer's modules, except attributes that equal the index of the layer."""
    settings = [
        {
            (name, key): value
            for name, module in layer.named_modules()
            for key, value in vars(module).items()
            if type(value) in SETTING_TYPES
        }
        for layer in layers
    ]
    indices = {
        key for key in settings[0] if all(layer_settings.get(key) == index for index, layer_settings in enumerate(settings))
    }
    return [{key: value for key, value in layer_settings.items() if key not in indices} for layer_settings in settings]


def _tensor_description(tensor: Tensor) -> Any:
    """Return the properties in which tensors of equal layers agree; hooks are compared by identity."""
    hooks = (tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)) and id(tensor)
    return type(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, tensor.requires_grad, hooks
