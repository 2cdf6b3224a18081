"""One call of an enabled module: through the backend, or as it was.

Training goes through the backend. So does evaluation: a forward pass in chunks is small, too. Generation does not: with a cache
of keys and values and one token at a time there is nothing to save, and every length would be another shape.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from streamfx.frontend.backend import streambp
from streamfx.integrations import packing, plain_weights
from streamfx.integrations.engines import DATA_PARALLEL, is_held
from streamfx.tools.inspect.side_effect_guard import ENABLED
from streamfx.tools.report.first_step_notice import Compiled, noted_in
from streamfx.torch_private.autograd import is_in_data_parallel
from streamfx.torch_private.dynamo import cause_of, gives_back, is_switched_off, is_traced_here, isolated

CACHES = ("past_key_values", "cache_params")
HOOK = "make_inputs_require_grads"  # set for checkpointing alone: gradients of parameters are the same without it


@dataclass
class CallCounts:
    """How many calls of a module went where."""

    compiled: int = 0
    plain: int = 0


class Calls:
    """Stands in for a module's `__call__`; counts what it does."""

    note, engine = "", ""  # what is added to what `Enabled` says, and which engine was seen around the calls
    enabled: Any = None  # the `Enabled` that it is of

    def __init__(
        self, module: nn.Module, options: Mapping[str, Any], dynamic: bool | None, look_again: Callable[[], bool]
    ) -> None:
        self.module, self.counts = module, CallCounts()
        setattr(self, ENABLED, self)
        self._is_off = gives_back()
        self._look_again, self._has_looked = look_again, False
        keywords = {"dynamic": dynamic, "options": dict(options), **isolated()}
        self.asks = packing.asks(self.module)
        told = packing.told if self.asks else _as_it_is
        self._whole = torch.compile(told(self.module._call_impl), backend=streambp, **keywords)
        self._without_cache = torch.compile(told(without_cache(self.module._call_impl)), backend=streambp, **keywords)

    def install(self) -> None:
        self.module._compiled_call_impl = self
        plain_weights.listen()
        if self.asks:
            packing.listen()

    def remove(self) -> None:
        if self.is_installed:
            self.module._compiled_call_impl = None
            plain_weights.forget()
            if self.asks:
                packing.forget()

    @property
    def is_installed(self) -> bool:
        return self.module._compiled_call_impl is self

    @property
    def is_off(self) -> bool:
        """Whether nothing is compiled, whoever asks for it."""
        return self._is_off or is_switched_off()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_traced = is_traced_here()
        if not is_traced and self._is_wrapped_since():
            return self.module(*args, **kwargs)
        if is_traced or generates(kwargs) or self.is_off:
            self.counts.plain += 1
            return self.module._call_impl(*args, **kwargs)
        self.counts.compiled += 1
        self.engine = self.engine or (DATA_PARALLEL if is_in_data_parallel() else "")
        call = self._whole if keeps_cache(kwargs) else self._without_cache
        args = (packing.found_in(args, kwargs), *args) if self.asks else args
        return run(call, self.module, args, kwargs, seen=None if self.enabled is None else self.enabled.compiled)

    def _is_wrapped_since(self) -> bool:
        """Whether an engine has taken the model's weights after `enable`; the first call looks at all modules."""
        with_parts, self._has_looked = not self._has_looked, True
        return is_held(self.module, with_parts) and self._look_again()


def run(
    call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, sharers: int = 1, seen: list[Compiled] | None = None
) -> Any:
    """A compiled call of a module, whose errors are those of the model; `sharers` modules share the graphs of the function, and
    those that are compiled in it are added to `seen`.
    """
    with graphs_as_wanted(sharers), without_checkpointing(module), noted_in(seen):
        try:
            return call(*args, **kwargs)
        except Exception as error:
            cause = cause_of(error)
            if cause is None:
                raise
    raise cause  # out here: not "during handling" of the compiler's error, which only wraps it


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def keeps_cache(arguments: Mapping[str, Any]) -> bool:
    """Whether keys and values that a call returns may be read."""
    return not torch.is_grad_enabled() or any(arguments.get(name) is not None for name in ("use_cache", *CACHES))


def generates(arguments: Mapping[str, Any]) -> bool:
    """Whether a call is a step of generation: without gradients, and with a cache asked for or given."""
    cached = bool(arguments.get("use_cache")) or any(arguments.get(name) is not None for name in CACHES)
    return cached and not torch.is_grad_enabled()


def without_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves keys and values out of what a model returns in training, which nobody reads: every layer's would be kept."""

    def call(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        if isinstance(output, OrderedDict) and any(name in output for name in CACHES):
            return type(output)(**{name: value for name, value in output.items() if name not in CACHES})
        return output

    return call


def graphs_as_wanted(sharers: int = 1) -> AbstractContextManager[None]:
    """Keeps Dynamo from cutting graphs at the buckets of DistributedDataParallel, and from sharing one between unequal layers.

    As many graphs are allowed for a function that modules share as if each had its own.
    """
    config = torch._dynamo.config
    is_parallel = torch.distributed.is_available() and torch.distributed.is_initialized()
    wanted: dict[str, Any] = {"optimize_ddp": False, "skip_fsdp_guards": False} if is_parallel else {}
    if sharers > 1:
        limits = ("recompile_limit", "accumulated_recompile_limit")
        wanted |= {name: getattr(config, name) * sharers for name in limits}
    return config.patch(wanted) if wanted else nullcontext()


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
