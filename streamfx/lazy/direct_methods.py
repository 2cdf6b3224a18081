"""Methods of `Tensor` that read its memory directly, without dispatch: `numpy`, `data_ptr`, `tolist`, and others.

A deferred tensor, whose values are computed when they are used, runs them on a plain tensor with its values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from streamfx.torch_private import untraced

CHECKS_GRADIENT = ("__array__", "__dlpack__", "numpy", "tolist")  # they raise an error if a gradient is required
READS_MEMORY = ("_typed_storage", "data_ptr", "is_shared", "share_memory_", "storage")
# `untyped_storage` is not overridden: compilers use it as the identity of a tensor's memory, without reading from it


def override_direct_methods(cls: type[Tensor], dense: Callable[[Any], Tensor], memory: Callable[[Any], Tensor]) -> None:
    """Override these methods of a class of deferred tensors.

    `dense` returns the computed tensor, which requires a gradient if the deferred one does; `memory` returns it without a
    gradient.
    """
    for name in CHECKS_GRADIENT:
        setattr(cls, name, _on_plain_tensor(name, dense))
    for name in READS_MEMORY:
        setattr(cls, name, _on_plain_tensor(name, memory))


def _on_plain_tensor(name: str, get: Callable[[Any], Tensor]) -> Callable[..., Any]:
    """Return the method `Tensor.<name>` so that it runs on the plain tensor that `get` returns for a deferred tensor.

    While a compiler traces the deferred tensor, it runs on the tensor itself. A result that is a tensor is the operand:
    `share_memory_` returns it.
    """
    plain_method = getattr(Tensor, name)

    @untraced
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain_method(self if self._traced else get(self), *args, **kwargs)
        return self if isinstance(result, Tensor) else result

    method.__name__ = name
    return method
