"""What `enable` has done, in words, and how it is undone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamfx.errors import IntegrationError, OptionError
from streamfx.frontend.unpicklable import Unpicklable
from streamfx.integrations.calls import Calls
from streamfx.integrations.parts import CompiledModule, SharedFunctions, is_enabled
from streamfx.integrations.target import Target
from streamfx.integrations.targets import CompileTargets, found_in, models_of
from streamfx.log import log
from streamfx.options import resolved
from streamfx.tools.report.first_step_notice import Compiled
from streamfx.torch_private.checkpoints import checkpoints_around, run_with, run_without
from streamfx.torch_private.dynamo import SWITCH_ON, SWITCHED_OFF

ORIGIN = "streamfx.enable(...)"
USE_MEMORY = (
    'recommended on a GPU: memory_budget="auto", with which a step uses the memory that is free: larger chunks, less recomputed'
)
SHOWN = 3  # graphs of which a line says what became


class EnabledModules(Unpicklable):
    """Modules that run through the backend until `disable` is called: what `streamfx.enable` returns.

    It prints what is compiled and which calls went where; as a context manager it is undone behind the block. `calls` counts
    the calls of each module by its name, `compiled` are the graphs of training steps that were compiled so far.

    Args:
        given: the model or trainer.
        options: the backend's, by their names.
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

    def __init__(self, given: Any, options: Mapping[str, Any], dynamic: bool | None) -> None:
        self.options, self.dynamic, self._given = dict(options), dynamic, given
        self.compiled: list[Compiled] = []  # graphs of training steps, in the order in which they were met
        self._install(found_in(given))
        if self._is_off:
            log.warning("streamfx.enable: nothing is compiled, as %s: %s", SWITCHED_OFF, SWITCH_ON)

    def _install(self, found: CompileTargets) -> None:
        for target in found.targets:
            if target.module._compiled_call_impl is not None or is_enabled(target.module):
                raise IntegrationError(
                    f"streamfx.enable compiles {target.name} in place, and it is compiled already",
                    found="an earlier enable(...) or module.compile(...)",
                    do="call .disable() of what the first call returned, or leave module.compile(...) out",
                )
        self.targets, self.engines = tuple(found.targets), tuple(found.engines)
        shared = SharedFunctions(self.options, self.dynamic)
        self.calls: dict[str, Calls | CompiledModule] = {
            target.name: CompiledModule(target, shared)
            if target.is_part
            else Calls(target.module, self.options, self.dynamic, self._look_again)
            for target in found.targets
        }
        for target in found.targets:
            self.calls[target.name].enabled = self
            self.calls[target.name].install()
            if target.head is not None:
                target.head.narrow()
        # where nothing is compiled, layers keep their checkpoints
        parts = set() if self._is_off else {target.module for target in found.targets}
        around = [wrapper for _, model in models_of(self._given) for wrapper in checkpoints_around(model, parts)]
        self._checkpoints = [(wrapper, run_without(wrapper)) for wrapper in dict.fromkeys(around)]

    def _look_again(self) -> bool:
        """Whether an engine has wrapped modules since they were looked for; then it is done once more."""
        found = found_in(self._given)
        if not any(target.is_part for target in found.targets):
            return False
        self.disable()
        self._install(found)
        return True

    def disable(self) -> None:
        """Let all modules run as they did before; may be called again.

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
        for wrapper, kept in self._checkpoints:
            run_with(wrapper, kept)

    def __enter__(self) -> EnabledModules:
        return self

    def __exit__(self, *exception: object) -> None:
        self.disable()

    @property
    def _is_off(self) -> bool:
        return any(calls.is_off for calls in self.calls.values())

    @property
    def is_enabled(self) -> bool:
        """Whether any of the modules runs through the backend now."""
        return any(calls.is_installed for calls in self.calls.values())

    @property
    def _leaves_memory(self) -> bool:
        """Whether a step on a GPU runs in small chunks, though more memory may be free."""
        parameters = (parameter for target in self.targets for parameter in target.module.parameters())
        return resolved(self.options).memory_budget is None and any(own.device.type == "cuda" for own in parameters)

    def __str__(self) -> str:
        lines = [f"streamfx: {'on' if self.is_enabled else 'off'}; options {self.options or 'as they are by default'}"]
        engines = dict.fromkeys((*self.engines, *(calls.engine for calls in self.calls.values() if calls.engine)))
        lines += [f"  {engine}" for engine in engines]
        lines += [f"  nothing is compiled: {SWITCHED_OFF}"] if self._is_off else []
        lines += [f"  {USE_MEMORY}"] if self._leaves_memory else []
        alike: dict[tuple[str, str], list[Target]] = {}
        for target in self.targets:
            alike.setdefault((type(target.module).__name__, target.why), []).append(target)
        for (kind, why), targets in alike.items():
            calls = [self.calls[target.name] for target in targets]
            compiled, plain = sum(own.counts.compiled for own in calls), sum(own.counts.plain for own in calls)
            names = targets[0].name if len(targets) == 1 else f"{targets[0].name} and {len(targets) - 1} like it"
            note = next((own.note for own in calls if own.note), "")
            lines.append(f"  {names} ({kind}): {why}; {compiled} calls through streambp, {plain} as they were{note}")
        texts = list(dict.fromkeys(compiled.text for compiled in self.compiled[-SHOWN:]))
        before = len(self.compiled) - len(self.compiled[-SHOWN:])
        lines += [f"  {text}" for text in texts] + ([f"  and {before} graphs before"] if before else [])
        return "\n".join(lines)

    __repr__ = __str__


def check_dynamic(dynamic: Any) -> None:
    """Raise before anything is compiled."""
    if dynamic is not None and not isinstance(dynamic, bool):
        raise OptionError(
            f"dynamic of {ORIGIN} cannot be {dynamic!r}",
            found=f"{dynamic!r} ({type(dynamic).__name__})",
            do="give True (one graph for all lengths), False (a graph for each), or None (torch.compile's default)",
        )
