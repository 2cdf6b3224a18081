"""Calls of modules whose weights an engine shards: the engine's hooks run unchanged, and the forward between them is compiled.

Engines with sharded parameters (FSDP) gather weights in a hook before a module's forward and free them in a hook after it. A
graph across a hook would break there, so each wrapped module's forward is a graph. The remainder of a module that contains
wrapped ones (the *rest*) breaks at their calls; if Dynamo gives up on its function (a break inside of a loop), its other
children are compiled separately, and functions of integers run in eager (`torch_private/eager_frames.py`). *Deferred* outputs
(lazy logits) are computed when they are used; *dense* ones are plain tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from streamfx.frontend.backend import streambp
from streamfx.integrations.calls import CallCounts, Calls, generates, keeps_cache, run, without_cache
from streamfx.integrations.target import Target
from streamfx.lazy.deferred import DeferredTensor
from streamfx.tools.inspect.side_effect_guard import ENABLED
from streamfx.torch_private import is_sharded
from streamfx.torch_private.dynamo import is_switched_off, isolation_keywords
from streamfx.torch_private.eager_frames import compile_function
from streamfx.torch_private.fsdp import allow_tracing, frees_weights, restore_tracing_refusal

USE_CACHE = "use_cache"


def is_enabled(module: nn.Module) -> bool:
    """Return whether `enable` has replaced a module's forward (not its call, which `_compiled_call_impl` shows)."""
    return hasattr(module.__dict__.get("forward"), ENABLED)


def calls_of(module: nn.Module) -> Calls | CompiledModule | None:
    """Return the object by which `enable` has replaced a module's call or forward; None if the module is not enabled."""
    for slot in (module._compiled_call_impl, module.__dict__.get("forward")):
        if isinstance(slot, Calls) or hasattr(slot, ENABLED):
            return slot if isinstance(slot, Calls) else getattr(slot, ENABLED)
    return None


class SharedFunctions:
    """Compiled functions. Modules with the same forward share one function and its graphs; Dynamo's guards distinguish them.

    Dynamo does not guard the contents of buffers. A graph may depend on them (a mask), checks them on each call, and
    falls back to the full sequence if they changed. So modules with different buffers get different graphs.
    """

    def __init__(self, options: Mapping[str, Any], dynamic: bool | None) -> None:
        """Start without compiled functions; they are compiled with these options. `parts` collects all modules that use them."""
        self.options, self.keywords = dict(options), {"dynamic": dynamic, **isolation_keywords()}
        self.parts: list[CompiledModule] = []
        self.generating = 0  # active generation calls: nested calls are not compiled, either
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}  # compiled functions by key: see `compiled_function`
        self._distinct: dict[tuple[Any, ...], list[nn.Module]] = {}  # by key, modules with buffers that differ from each other

    def compiled_function(
        self, key: tuple[Any, ...], module_call: Callable[..., Any], with_cache: bool, dense: bool
    ) -> Callable[..., Any]:
        """Return the compiled function of a key; `module_call` is compiled at the first call with this key.

        `with_cache` keeps the key-value cache in its output; `dense` forbids deferred outputs.
        """
        key = (*key, with_cache, dense)
        if key not in self._compiled:
            options = {**({"outputs": "dense"} if dense else {}), **self.options}
            to_compile = module_call if with_cache else without_cache(module_call)
            self._compiled[key] = compile_function(to_compile, streambp, options=options, **self.keywords)
        return self._compiled[key]

    def key_with_buffers(self, key: tuple[Any, ...], module: nn.Module) -> tuple[Any, ...]:
        """Return the key, extended by a number that modules with this key share if their buffers have equal contents."""
        distinct_modules = self._distinct.setdefault(key, [])
        index = next((i for i, other in enumerate(distinct_modules) if _has_same_buffers(module, other)), len(distinct_modules))
        if index == len(distinct_modules):
            distinct_modules.append(module)
        return (*key, index)

    def returns_deferred(self) -> bool:
        """Return whether a wrapped module, such as a head, returns deferred outputs to its caller.

        This is known of modules that were called. One that was not called yet counts as such a module if it is the only one of
        its class and its weights are not freed after its forward.
        """
        wrapped = [compiled for compiled in self.parts if compiled.is_wrapped and not compiled.is_rest]
        kinds = Counter(type(compiled.module) for compiled in wrapped)
        return any(compiled.returned_deferred(default=kinds[type(compiled.module)] == 1) for compiled in wrapped)


class CompiledModule:
    """Replaces a module's `__call__`, or its forward if an engine's hooks surround it."""

    def __init__(self, target: Target, shared: SharedFunctions) -> None:
        """Prepare to replace a target's call, or its forward if an engine's hooks surround it; compiled at the first call."""
        self.module, self.owner, self.within_hooks = target.module, target.owner, target.within_hooks
        self.is_rest, self.is_wrapped = target.is_rest, target.is_wrapped
        self._returned_deferred: bool | None = None  # whether the last output was deferred; None before the first call
        self.shared, self.counts, self.note, self.engine = shared, CallCounts(), "", ""
        self.enabled: Any = None  # the `EnabledModules` that holds this object
        shared.parts.append(self)
        original = self.module.forward if self.within_hooks else self.module._call_impl
        self._original: Callable[..., Any] = original
        self._function, self._base_key, self._leading_args = _unbound(original, self.module)
        self._signature = inspect.signature(original)
        self._key: tuple[Any, ...] | None = None  # `_base_key` and a number for the module's buffers, from the first call on
        self._had_forward = "forward" in self.module.__dict__  # as an attribute of the instance, not of the class
        # A compiled root may call this function; Dynamo must not trace its frame.
        self._installed = torch.compiler.disable(self._run)
        functools.update_wrapper(self._installed, original)
        setattr(self._installed, ENABLED, self)

    def install(self) -> None:
        """Replace the module's `__call__`, or its forward if an engine's hooks surround it."""
        self._refused = allow_tracing(self.module)
        if self.within_hooks:
            self.module.__dict__["forward"] = self._installed
        else:
            self.module._compiled_call_impl = self._installed

    def remove(self) -> None:
        """Undo `install`, if the module is still called through this object."""
        if not self.is_installed:
            return
        restore_tracing_refusal(self._refused)
        if not self.within_hooks:
            self.module._compiled_call_impl = None
        elif self._had_forward:
            self.module.__dict__["forward"] = self._original
        else:
            del self.module.__dict__["forward"]

    @property
    def is_installed(self) -> bool:
        """Whether the module is called through this object now."""
        slot = self.module.__dict__.get("forward" if self.within_hooks else "_compiled_call_impl")
        return slot is self._installed

    @property
    def is_off(self) -> bool:
        """Whether compilation is switched off globally."""
        return is_switched_off()

    def returned_deferred(self, default: bool) -> bool:
        """Return whether the last outputs of the module were deferred (to be computed at their use).

        Before its first call, return `default`, but False if its weights are freed after its forward.
        """
        return default and not self._frees_weights() if self._returned_deferred is None else self._returned_deferred

    def _generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the original function in a generation call. Modules that it calls count this, and are not compiled, either."""
        self.counts.plain += 1
        self.shared.generating += 1
        try:
            return self._original(*args, **kwargs)
        finally:
            self.shared.generating -= 1

    def _with_no_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments, with `use_cache=False` in training if the caller does not say otherwise.

        Otherwise the layers, which are compiled separately, would fill a key-value cache that is never read.
        """
        if keeps_cache(kwargs) or USE_CACHE not in self._signature.parameters:
            return kwargs
        arguments = self._signature.bind_partial(*args, **kwargs).arguments
        return kwargs if arguments.get(USE_CACHE) is not None else {**kwargs, USE_CACHE: False}

    def _frees_weights(self) -> bool:
        """Return whether an engine frees the module's weights after its forward."""
        return self.owner is not None and frees_weights(self.owner)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module compiled, and remember whether its output is deferred.

        Run it in eager for generation, if compilation is off, or if it is the rest of a module and a wrapped module (the head)
        returns deferred outputs: a loss on them then runs in chunks.
        """
        if generates(kwargs) or self.shared.generating:
            return self._generate(args, kwargs)
        if self.is_off:
            self.counts.plain += 1
            return self._original(*args, **kwargs)
        if self.is_rest:
            kwargs = self._with_no_cache(args, kwargs)
        if self.is_rest and self.shared.returns_deferred():
            self.counts.plain += 1
            self.note = "; in eager, so that a loss on deferred outputs of a wrapped module runs in chunks"
            return run(self._original, self.module, args, kwargs)
        if self._key is None:  # not before the first call: buffers may be loaded after `enable`
            self._key = self.shared.key_with_buffers(self._base_key, self.module)
        self.counts.compiled += 1
        dense = self._frees_weights()  # a deferred output could not be computed without the weights
        self.note = "; its outputs are not deferred, because its weights are freed after its forward" if dense else ""
        compiled_call = self.shared.compiled_function(self._key, self._function, keeps_cache(kwargs), dense)
        compiled_graphs = None if self.enabled is None else self.enabled.compiled
        result = run(
            compiled_call,
            self.module,
            (*self._leading_args, *args),
            kwargs,
            sharers=len(self.shared.parts),
            compiled_graphs=compiled_graphs,
        )
        self._returned_deferred = isinstance(result, DeferredTensor)
        return result


def _unbound(function: Any, module: nn.Module) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]:
    """Return (the function to compile, a key by which modules share it, its leading arguments) for a module's call.

    A method of the module becomes its plain function, with the module as the leading argument, so that modules of one class
    share it.
    """
    if getattr(function, "__self__", None) is module:
        return function.__func__, (function.__func__, type(module)), (module,)
    return function, (function,), ()


def _has_same_buffers(module: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules have buffers of the same names and contents; never if they are different sharded tensors."""
    buffers, other_buffers = dict(module.named_buffers()), dict(other.named_buffers())
    return buffers.keys() == other_buffers.keys() and all(_is_same(buffers[name], other_buffers[name]) for name in buffers)


def _is_same(buffer: Tensor, other: Tensor) -> bool:
    """Return whether two buffers have the same properties and contents; False for sharded ones."""
    if buffer is other:
        return True
    if is_sharded(buffer) or is_sharded(other) or buffer.device != other.device or buffer.dtype != other.dtype:
        return False  # comparing sharded buffers needs communication
    return buffer.shape == other.shape and (buffer.is_meta or torch.equal(buffer, other))
