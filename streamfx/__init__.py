"""streamfx: a `torch.compile` backend that computes any decoder in chunks of its sequence.

This module exports the public names. It imports each module that compiles, traces, or plans at its first use: `import
streamfx` does not even import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from streamfx.errors import (
    IntegrationError,
    NotComparableError,
    NotStreamedError,
    NotTracedError,
    OffloadSpaceError,
    OptionError,
    OverBudgetError,
    PlanError,
    ProfileError,
    RanksDifferError,
    ReportError,
    RuleError,
    StaleGraphError,
    StaleOutputError,
    StreamFXError,
    TransposedOutputError,
)
from streamfx.options import Options, configure
from streamfx.renamed import RENAMED, warn_renamed

if TYPE_CHECKING:
    from streamfx.frontend.backend import streambp
    from streamfx.frontend.check_recurrence import check_recurrence
    from streamfx.frontend.register_recurrences import register_recurrence
    from streamfx.frontend.register_rules import register_rule
    from streamfx.integrations import EnabledModules, disable, enable
    from streamfx.tools.inspect.compare import compare
    from streamfx.tools.inspect.explain import Explanation, explain
    from streamfx.tools.inspect.profile import Profile, profile
    from streamfx.tools.inspect.verify import Verification, verify
    from streamfx.tools.planner.plan import plan
    from streamfx.tools.planner.report import PlanReport
    from streamfx.tools.report.comparison import Comparison

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "EnabledModules",
    "Explanation",
    "IntegrationError",
    "NotComparableError",
    "NotStreamedError",
    "NotTracedError",
    "OffloadSpaceError",
    "OptionError",
    "Options",
    "OverBudgetError",
    "PlanError",
    "PlanReport",
    "Profile",
    "ProfileError",
    "RanksDifferError",
    "ReportError",
    "RuleError",
    "StaleGraphError",
    "StaleOutputError",
    "StreamFXError",
    "TransposedOutputError",
    "Verification",
    "check_recurrence",
    "compare",
    "configure",
    "disable",
    "enable",
    "explain",
    "plan",
    "profile",
    "register_recurrence",
    "register_rule",
    "streambp",
    "verify",
]

_LAZY = {
    "Comparison": "streamfx.tools.report.comparison",
    "compare": "streamfx.tools.inspect.compare",
    "streambp": "streamfx.frontend.backend",
    "Explanation": "streamfx.tools.inspect.explain",
    "explain": "streamfx.tools.inspect.explain",
    "Profile": "streamfx.tools.inspect.profile",
    "profile": "streamfx.tools.inspect.profile",
    "Verification": "streamfx.tools.inspect.verify",
    "verify": "streamfx.tools.inspect.verify",
    "EnabledModules": "streamfx.integrations",
    "disable": "streamfx.integrations",
    "enable": "streamfx.integrations",
    "plan": "streamfx.tools.planner.plan",
    "PlanReport": "streamfx.tools.planner.report",
    "check_recurrence": "streamfx.frontend.check_recurrence",
    "register_recurrence": "streamfx.frontend.register_recurrences",
    "register_rule": "streamfx.frontend.register_rules",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use (PEP 562); an old name warns once and returns the new one."""
    if name in RENAMED:
        warn_renamed(f"streamfx.{name}", f"streamfx.{RENAMED[name]}")
        globals()[name] = renamed = getattr(import_module(__name__), RENAMED[name])
        return renamed
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    """Return the public names only."""
    return sorted([*__all__, "__version__"])
