"""The handle that `enable` returns: a summary of the enabled modules, and how to disable them.

A *target* is a module to compile. `Calls` (or `CompiledModule`, if an engine such as FSDP shards its weights) replaces its
calls and counts them. The *head* of a target is a trainer's own loss over the vocabulary, whose width is limited meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamfx.errors import IntegrationError, OptionError
from streamfx.frontend.unpicklable import Unpicklable
from streamfx.integrations.calls import Calls
from streamfx.integrations.parts import CompiledModule, SharedFunctions, is_enabled
from streamfx.integrations.target import Target
from streamfx.integrations.targets import CompileTargets, find_targets, models_of
from streamfx.log import log
from streamfx.options import resolve_options
from streamfx.tools.report.notices import Compiled
from streamfx.torch_private.checkpoints import checkpoints_around, disable_checkpointing, restore_checkpointing
from streamfx.torch_private.dynamo import SWITCH_ON, SWITCHED_OFF

ORIGIN = "streamfx.enable(...)"
USE_MEMORY = (
    'recommended on a GPU: memory_budget="auto": a step then uses the free memory for larger chunks and less recomputation'
)
MAX_SHOWN = 3  # graphs listed in the summary


class EnabledModules(Unpicklable):
    """Modules that run through the backend until `disable` is called: the result of `streamfx.enable`.

    It prints the compiled modules and the number of calls; as a context manager it disables them after the block.
    `calls` maps the name of each module to its calls, `compiled` lists the graphs of training steps compiled so far.

    Args:
        trainer_or_model: the model or trainer.
        options: the backend's, by name.
        dynamic: as in `torch.compile`.

    Example:
        >>> import torch, streamfx
        >>> model = torch.nn.Linear(8, 8)
        >>> with streamfx.enable(model, chunk_size=16) as enabled:
        ...     model(torch.randn(1, 64, 8)).sum().backward()
        >>> enabled.calls["model"].counts.compiled, enabled.is_enabled
        (1, False)
    """

    _keep = "copy the model without it, and enable the copy: streamfx.enable(copy, **enabled.options)"

    def __init__(self, trainer_or_model: Any, options: Mapping[str, Any], dynamic: bool | None) -> None:
        """Find the modules of a model or a trainer that must be compiled, and replace their calls."""
        self.options, self.dynamic, self._trainer_or_model = dict(options), dynamic, trainer_or_model
        self.compiled: list[Compiled] = []  # graphs of training steps, in order of compilation
        self._install(find_targets(trainer_or_model))
        if self._is_off:
            log.warning("streamfx.enable: nothing is compiled, because %s: %s", SWITCHED_OFF, SWITCH_ON)

    def _install(self, compile_targets: CompileTargets) -> None:
        """Replace the calls of the targets, limit the width of trainers' heads, and disable checkpoint wrappers around targets.

        Raise `IntegrationError`, before anything is changed, if a target is compiled already.
        """
        for target in compile_targets.targets:
            if target.module._compiled_call_impl is not None or is_enabled(target.module):
                raise IntegrationError(
                    f"streamfx.enable compiles {target.name} in place, but it is already compiled",
                    found="an earlier enable(...) or module.compile(...)",
                    do="call .disable() of the first result, or omit module.compile(...)",
                )
        self.targets, self.engines = tuple(compile_targets.targets), tuple(compile_targets.engines)
        shared = SharedFunctions(self.options, self.dynamic)
        self.calls: dict[str, Calls | CompiledModule] = {
            target.name: CompiledModule(target, shared)
            if target.is_part
            else Calls(target.module, self.options, self.dynamic, self._enable_wrapped)
            for target in compile_targets.targets
        }
        for target in compile_targets.targets:
            self.calls[target.name].enabled = self
            self.calls[target.name].install()
            if target.head is not None:
                target.head.narrow()
        # Without compilation, layers keep their checkpoint wrappers.
        modules = set() if self._is_off else {target.module for target in compile_targets.targets}
        wrappers = [wrapper for _, model in models_of(self._trainer_or_model) for wrapper in checkpoints_around(model, modules)]
        self._checkpoints = [(wrapper, disable_checkpointing(wrapper)) for wrapper in dict.fromkeys(wrappers)]

    def _enable_wrapped(self) -> bool:
        """Enable the modules of an engine that has wrapped the model since `enable`; return whether there are any."""
        targets = find_targets(self._trainer_or_model)
        if not any(target.is_part for target in targets.targets):
            return False
        self.disable()
        self._install(targets)
        return True

    def disable(self) -> None:
        """Undo `enable`: all modules run as before. May be called repeatedly.

        Example:
            >>> import torch, streamfx
            >>> enabled = streamfx.enable(torch.nn.Linear(8, 8))
            >>> enabled.disable()
            >>> enabled.is_enabled
            False
        """
        for target in self.targets:
            calls = self.calls[target.name]
            if calls.is_installed and target.head is not None:
                target.head.restore()
            calls.remove()
        for wrapper, checkpoint_fn in self._checkpoints:
            restore_checkpointing(wrapper, checkpoint_fn)

    def __enter__(self) -> EnabledModules:
        return self

    def __exit__(self, *exception: object) -> None:
        self.disable()

    @property
    def _is_off(self) -> bool:
        """Whether compilation is switched off for any of the modules."""
        return any(calls.is_off for calls in self.calls.values())

    @property
    def is_enabled(self) -> bool:
        """Whether any of the modules runs through the backend now."""
        return any(calls.is_installed for calls in self.calls.values())

    @property
    def _leaves_memory(self) -> bool:
        """Whether a step on a GPU may use small chunks although memory is free: the model is there, and no budget is set."""
        parameters = (parameter for target in self.targets for parameter in target.module.parameters())
        return resolve_options(self.options).memory_budget is None and any(
            parameter.device.type == "cuda" for parameter in parameters
        )

    def __str__(self) -> str:
        """Return the summary: the options, a line for each kind of module with its numbers of calls, and the last graphs."""
        lines = [f"streamfx: {'on' if self.is_enabled else 'off'}; options {self.options or 'default'}"]
        engines = dict.fromkeys((*self.engines, *(calls.engine for calls in self.calls.values() if calls.engine)))
        lines += [f"  {engine}" for engine in engines]
        lines += [f"  nothing is compiled: {SWITCHED_OFF}"] if self._is_off else []
        lines += [f"  {USE_MEMORY}"] if self._leaves_memory else []
        targets_by_kind: dict[tuple[str, str], list[Target]] = {}
        for target in self.targets:
            targets_by_kind.setdefault((type(target.module).__name__, target.why), []).append(target)
        for (kind, why), targets in targets_by_kind.items():
            calls = [self.calls[target.name] for target in targets]
            compiled, plain = sum(call.counts.compiled for call in calls), sum(call.counts.plain for call in calls)
            names = targets[0].name if len(targets) == 1 else f"{targets[0].name} and {len(targets) - 1} like it"
            note = next((call.note for call in calls if call.note), "")
            lines.append(f"  {names} ({kind}): {why}; {compiled} calls through streambp, {plain} in eager{note}")
        texts = list(dict.fromkeys(compiled.text for compiled in self.compiled[-MAX_SHOWN:]))
        earlier = len(self.compiled) - len(self.compiled[-MAX_SHOWN:])
        lines += [f"  {text}" for text in texts] + ([f"  and {earlier} earlier graphs"] if earlier else [])
        return "\n".join(lines)

    __repr__ = __str__


def check_dynamic(dynamic: Any) -> None:
    """Raise `OptionError` unless the argument `dynamic` is True, False or None."""
    if dynamic is not None and not isinstance(dynamic, bool):
        raise OptionError(
            f"dynamic of {ORIGIN} cannot be {dynamic!r}",
            found=f"{dynamic!r} ({type(dynamic).__name__})",
            do="give True (one graph for all lengths), False (a graph for each), or None (torch.compile's default)",
        )
