"""What has been enabled before: the same once more is no fault, and `disable` finds it by the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from streamfx.integrations.enabled import EnabledModules
from streamfx.integrations.parts import calls_of
from streamfx.integrations.targets import found_in, models_of
from streamfx.log import log

REPLACED = "streamfx.enable: options %s take the place of %s, with which the model was enabled before"


def enabled(given: Any, options: Mapping[str, Any], dynamic: bool | None) -> EnabledModules:
    """What is there, if the very same was enabled so before; else it is made, in the place of what was there."""
    modules = {target.module for target in found_in(given).targets}
    before = next((one for one in _of(modules) if {target.module for target in one.targets} == modules), None)
    if before is not None:
        if (before.options, before.dynamic) == (dict(options), dynamic):
            return before
        log.warning(REPLACED, _told(options, dynamic), _told(before.options, before.dynamic))
        before.disable()
    return EnabledModules(given, options, dynamic)


def enabled_in(given: Any) -> list[EnabledModules]:
    """All that is enabled of a model or a trainer."""
    if isinstance(given, EnabledModules):
        return [given]
    return _of(part for _, model in models_of(given, "disable") for part in model.modules())


def _of(modules: Iterable[nn.Module]) -> list[EnabledModules]:
    return list(dict.fromkeys(calls.enabled for module in modules if (calls := calls_of(module)) is not None))


def _told(options: Mapping[str, Any], dynamic: bool | None) -> dict[str, Any]:
    return {**options, **({} if dynamic is None else {"dynamic": dynamic})}
