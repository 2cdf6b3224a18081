"""Dispatch one call of an enabled module: to the compiled call, through the backend, or to the original forward ("plain" calls).

Training runs through the backend, and so does evaluation: a chunked forward pass also saves memory. Generation does not: with a
key-value cache and one token per step there is nothing to save, and every length would need another shape. With packed
sequences, a call gets its document boundaries as another argument (`packing.py`).
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
from streamfx.integrations.engines import DATA_PARALLEL, is_sharded_by_engine
from streamfx.tools.inspect.side_effect_guard import ENABLED
from streamfx.tools.report.notices import Compiled, noted_in
from streamfx.torch_private.autograd import is_in_data_parallel
from streamfx.torch_private.dynamo import (
    is_disabled_by_environment,
    is_switched_off,
    is_traced_here,
    isolation_keywords,
    user_error_of,
)
from streamfx.torch_private.eager_errors import without_tracer_log
from streamfx.torch_private.eager_frames import compile_function

CACHES = ("past_key_values", "cache_params", "cache")  # "cache" since transformers 5.24
CHECKPOINTING_HOOK = "make_inputs_require_grads"  # parameter gradients are the same without it


@dataclass
class CallCounts:
    """The numbers of compiled and of eager calls of a module."""

    compiled: int = 0
    plain: int = 0


class Calls:
    """Replaces a module's `__call__` and counts the calls."""

    note, engine = "", ""  # a suffix for the summary of `EnabledModules`, and the engine found around the calls
    enabled: Any = None  # the `EnabledModules` that holds this object

    def __init__(
        self, module: nn.Module, options: Mapping[str, Any], dynamic: bool | None, enable_wrapped: Callable[[], bool]
    ) -> None:
        """Prepare two compiled versions of a module's call: one that returns its key-value cache, and one that drops it.

        `enable_wrapped` enables the modules of an engine that has wrapped this module since; it returns whether there are any.
        """
        self.module, self.counts = module, CallCounts()
        setattr(self, ENABLED, self)
        self._was_off_at_start = is_disabled_by_environment()
        self._enable_wrapped = enable_wrapped
        self._has_checked_parts = False  # whether submodules were checked for an engine that took over their weights
        keywords = {"dynamic": dynamic, "options": dict(options), **isolation_keywords()}
        self.needs_boundaries = packing.needs_boundaries(self.module)
        wrap = packing.with_boundaries if self.needs_boundaries else _without_boundaries
        self._with_cache = compile_function(wrap(self.module._call_impl), streambp, **keywords)
        self._without_cache = compile_function(wrap(without_cache(self.module._call_impl)), streambp, **keywords)

    def install(self) -> None:
        """Replace the module's `__call__` by this object, and the functions of other libraries that would break its graph."""
        self.module._compiled_call_impl = self
        plain_weights.replace_functions()
        if self.needs_boundaries:
            packing.replace_functions()

    def remove(self) -> None:
        """Undo `install`, if the module is still called through this object."""
        if self.is_installed:
            self.module._compiled_call_impl = None
            plain_weights.restore_functions()
            if self.needs_boundaries:
                packing.restore_functions()

    @property
    def is_installed(self) -> bool:
        """Whether the module is called through this object now."""
        return self.module._compiled_call_impl is self

    @property
    def is_off(self) -> bool:
        """Whether compilation is switched off globally."""
        return self._was_off_at_start or is_switched_off()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module compiled, or its original forward if it is being traced, generates, or compilation is off.

        If an engine has wrapped the module since `enable`, `_enable_engine_modules` has removed this object and enabled the
        engine's modules, so the call is repeated through them.
        """
        is_traced = is_traced_here()
        if not is_traced and self._enable_engine_modules():
            return self.module(*args, **kwargs)
        if is_traced or generates(kwargs) or self.is_off:
            self.counts.plain += 1
            return self.module._call_impl(*args, **kwargs)
        self.counts.compiled += 1
        self.engine = self.engine or (DATA_PARALLEL if is_in_data_parallel() else "")
        call = self._with_cache if keeps_cache(kwargs) else self._without_cache
        args = (packing.find_boundaries(args, kwargs), *args) if self.needs_boundaries else args
        return run(call, self.module, args, kwargs, compiled_graphs=None if self.enabled is None else self.enabled.compiled)

    def _enable_engine_modules(self) -> bool:
        """Enable the modules that an engine (FSDP, DeepSpeed) wraps in place of this one, if it took over the weights later.

        Return whether it did, since `enable`. Submodules are only checked at the first call.
        """
        with_parts = not self._has_checked_parts
        self._has_checked_parts = True
        return is_sharded_by_engine(self.module, with_parts) and self._enable_wrapped()


def run(
    call: Callable[..., Any],
    module: nn.Module,
    args: Any,
    kwargs: Any,
    sharers: int = 1,
    compiled_graphs: list[Compiled] | None = None,
) -> Any:
    """Run a call of a module, compiled or not, and return its result, with Dynamo's settings and without checkpointing.

    Errors of the model are raised without the compiler's wrapper. `sharers` modules share the graphs of the function, which
    raises its recompile limit. Graphs compiled during the call are appended to `compiled_graphs`.
    """
    with dynamo_settings(sharers), without_checkpointing(module), noted_in(compiled_graphs), without_tracer_log():
        try:
            return call(*args, **kwargs)
        except Exception as error:
            cause = user_error_of(error)
            if cause is None:
                raise
    raise cause  # outside of the handler, so that the traceback does not chain the compiler's wrapper


def _without_boundaries(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function itself: its arguments need no document boundaries."""
    return function


def keeps_cache(arguments: Mapping[str, Any]) -> bool:
    """Return whether the caller may read the key-value cache that a call with these keyword arguments returns.

    It may without gradients, or if it passes `use_cache` or a cache.
    """
    return not torch.is_grad_enabled() or any(arguments.get(name) is not None for name in ("use_cache", *CACHES))


def generates(arguments: Mapping[str, Any]) -> bool:
    """Return whether a call is a generation step: without gradients, and with a cache requested or passed."""
    cached = bool(arguments.get("use_cache")) or any(arguments.get(name) is not None for name in CACHES)
    return cached and not torch.is_grad_enabled()


def without_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function so that its output has no key-value cache.

    Training does not use the cache, and it would keep the keys and values of every layer.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        """Call the function, and return its output without caches."""
        output = function(*args, **kwargs)
        if isinstance(output, OrderedDict) and any(name in output for name in CACHES):
            return type(output)(**{name: value for name, value in output.items() if name not in CACHES})
        return output

    return call


def dynamo_settings(sharers: int = 1) -> AbstractContextManager[None]:
    """Context manager: set Dynamo's settings for a call.

    With several ranks, graphs are not split at DistributedDataParallel's buckets, and unequal FSDP layers share no graph. If
    `sharers` modules share a compiled function, its recompile limits are multiplied by their number.
    """
    config = torch._dynamo.config
    is_parallel = torch.distributed.is_available() and torch.distributed.is_initialized()
    settings: dict[str, Any] = {"optimize_ddp": False, "skip_fsdp_guards": False} if is_parallel else {}
    if sharers > 1:
        limits = ("recompile_limit", "accumulated_recompile_limit")
        settings |= {name: getattr(config, name) * sharers for name in limits}
    return config.patch(settings) if settings else nullcontext()


@contextmanager
def without_checkpointing(module: nn.Module) -> Iterator[None]:
    """Context manager: disable a model's own checkpointing, because the backend recomputes activations itself.

    The attribute `gradient_checkpointing` of submodules is False meanwhile, and forward hooks that only serve checkpointing are
    removed. Both are restored.
    """
    modules = [submodule for submodule in module.modules() if submodule.__dict__.get("gradient_checkpointing")]
    hook_tables = [
        submodule._forward_hooks
        for submodule in module.modules()
        if modules and any(map(_is_checkpointing_hook, submodule._forward_hooks.values()))
    ]
    saved_hooks = [(hook_table, dict(hook_table)) for hook_table in hook_tables]
    for submodule in modules:
        submodule.gradient_checkpointing = False  # type: ignore[assignment]
    for hook_table, hooks_before in saved_hooks:
        for key in [key for key, hook in hooks_before.items() if _is_checkpointing_hook(hook)]:
            del hook_table[key]
    try:
        yield
    finally:
        for submodule in modules:
            submodule.gradient_checkpointing = True  # type: ignore[assignment]
        for hook_table, hooks_before in saved_hooks:  # in the original order, without the hooks that the call has removed
            hooks_now = dict(hook_table)
            hook_table.clear()
            hook_table.update(
                {
                    **{key: hook for key, hook in hooks_before.items() if key in hooks_now or _is_checkpointing_hook(hook)},
                    **hooks_now,
                }
            )


def _is_checkpointing_hook(hook: Any) -> bool:
    """Return whether a hook was set by a library only so that checkpointing works."""
    return getattr(hook, "__name__", None) == CHECKPOINTING_HOOK
