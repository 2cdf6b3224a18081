"""One call of an enabled module: through the backend, or as it was.

Training goes through the backend. So does evaluation: a forward pass in chunks is small, too. Generation does not: with a cache
of keys and values and one token at a time there is nothing to save, and every length would be another shape.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from streamfx.backend import streambp
from streamfx.integrations import packing
from streamfx.torch_private.dynamo import cause_of, isolated

CACHES = ("past_key_values", "cache_params")
HOOK = "make_inputs_require_grads"  # set for checkpointing alone: gradients of parameters are the same without it


class Calls:
    """Stands in for a module's `__call__`; counts what it does."""

    def __init__(self, module: nn.Module, options: Mapping[str, Any], dynamic: bool | None) -> None:
        self.module, self.compiled, self.plain = module, 0, 0
        keywords = {"dynamic": dynamic, "options": dict(options), **isolated()}
        self.asks = packing.asks(module)
        told = packing.told if self.asks else _as_it_is
        self._whole = torch.compile(told(module._call_impl), backend=streambp, **keywords)
        self._without_cache = torch.compile(told(_without_cache(module._call_impl)), backend=streambp, **keywords)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or generates(kwargs):
            self.plain += 1
            return self.module._call_impl(*args, **kwargs)
        self.compiled += 1
        keeps_cache = not torch.is_grad_enabled() or any(kwargs.get(name) is not None for name in ("use_cache", *CACHES))
        call = self._whole if keeps_cache else self._without_cache
        args = (packing.found_in(args, kwargs), *args) if self.asks else args
        with in_one_graph(), without_checkpointing(self.module):
            try:
                return call(*args, **kwargs)
            except Exception as error:
                cause = cause_of(error)
                if cause is None:
                    raise
        raise cause  # out here: not "during handling" of the compiler's error, which only wraps it


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def generates(arguments: Mapping[str, Any]) -> bool:
    """Whether a call is a step of generation: without gradients, and with a cache asked for or given."""
    cached = bool(arguments.get("use_cache")) or any(arguments.get(name) is not None for name in CACHES)
    return cached and not torch.is_grad_enabled()


def _without_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves keys and values out of what a model returns in training, which nobody reads: every layer's would be kept."""

    def call(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        if isinstance(output, OrderedDict) and any(name in output for name in CACHES):
            return type(output)(**{name: value for name, value in output.items() if name not in CACHES})
        return output

    return call


def in_one_graph() -> AbstractContextManager[None]:
    """Keeps Dynamo from cutting graphs at the buckets of DistributedDataParallel."""
    is_parallel = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch._dynamo.config.patch(optimize_ddp=False) if is_parallel else nullcontext()


@contextmanager
def without_checkpointing(module: nn.Module) -> Iterator[None]:
    """Switches a model's own checkpointing off: the backend makes activations again by itself, and would not do it twice."""
    modules = [part for part in module.modules() if part.__dict__.get("gradient_checkpointing")]
    places = [part._forward_hooks for part in module.modules() if modules and any(map(_is_own, part._forward_hooks.values()))]
    kept = [(place, dict(place)) for place in places]
    for part in modules:
        part.gradient_checkpointing = False  # type: ignore[assignment]
    for place, before in kept:
        for key in [key for key, hook in before.items() if _is_own(hook)]:
            del place[key]
    try:
        yield
    finally:
        for part in modules:
            part.gradient_checkpointing = True  # type: ignore[assignment]
        for place, before in kept:  # in their order, and without hooks that the call has removed
            now = dict(place)
            place.clear()
            place.update({**{key: hook for key, hook in before.items() if key in now or _is_own(hook)}, **now})


def _is_own(hook: Any) -> bool:
    return getattr(hook, "__name__", None) == HOOK
