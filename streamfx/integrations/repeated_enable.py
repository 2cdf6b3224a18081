"""Repeated calls of `enable`, and the lookup of enabled modules for `disable`.

A *handle* (`EnabledModules`) is the result of `enable`: it holds the enabled modules (targets), the options and `dynamic`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from streamfx.integrations.enabled import EnabledModules
from streamfx.integrations.parts import calls_of
from streamfx.integrations.targets import find_targets, models_of
from streamfx.log import log

REPLACED = "streamfx.enable: the model was already enabled with options %s; they are replaced by %s"


def enable_once(model_or_trainer: Any, options: Mapping[str, Any], dynamic: bool | None) -> EnabledModules:
    """Enable the modules of a model or trainer, unless exactly these are enabled with the same options; return the handle.

    If they are enabled with other options, warn, and replace these.
    """
    modules = {target.module for target in find_targets(model_or_trainer).targets}
    existing = next((handle for handle in _handles_of(modules) if {target.module for target in handle.targets} == modules), None)
    if existing is not None:
        if (existing.options, existing.dynamic) == (dict(options), dynamic):
            return existing
        log.warning(REPLACED, _with_dynamic(existing.options, existing.dynamic), _with_dynamic(options, dynamic))
        existing.disable()
    return EnabledModules(model_or_trainer, options, dynamic)


def enabled_handles(model_or_trainer: Any) -> list[EnabledModules]:
    """Return the handles of all enabled modules in a model or a trainer; `model_or_trainer` may also be such a handle."""
    if isinstance(model_or_trainer, EnabledModules):
        return [model_or_trainer]
    return _handles_of(module for _, model in models_of(model_or_trainer, "disable") for module in model.modules())


def _handles_of(modules: Iterable[nn.Module]) -> list[EnabledModules]:
    """Return the handles that enabled these modules, without duplicates."""
    return list(dict.fromkeys(calls.enabled for module in modules if (calls := calls_of(module)) is not None))


def _with_dynamic(options: Mapping[str, Any], dynamic: bool | None) -> dict[str, Any]:
    """Return the options with `dynamic` among them, if it is set; for a log message."""
    return {**options, **({} if dynamic is None else {"dynamic": dynamic})}
