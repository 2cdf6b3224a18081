"""streamfx: a `torch.compile` backend that streams any decoder along its sequence.

What compiles, traces or plans is imported when it is first asked for: `import streamfx` does not even import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from streamfx.errors import (
    IntegrationError,
    NoRoom,
    NotComparable,
    NotStreamed,
    NotTraced,
    OptionError,
    OverBudget,
    PlanError,
    ProfileError,
    RanksDiffer,
    ReportError,
    RuleError,
    StaleGraph,
    StaleOutput,
    StreamFXError,
    TurnedOutput,
)
from streamfx.options import Options, configure

if TYPE_CHECKING:
    from streamfx.backend import streambp
    from streamfx.inspection.explain import Explanation, explain
    from streamfx.inspection.profile import Profile, profile
    from streamfx.inspection.verify import Verification, verify
    from streamfx.integrations import Enabled, disable, enable
    from streamfx.planner.plan import plan
    from streamfx.planner.report import PlanReport
    from streamfx.recurrence_laws import check_recurrence
    from streamfx.user_recurrences import register_recurrence
    from streamfx.user_rules import register_rule

__version__ = "0.1.0"

__all__ = [
    "Enabled",
    "Explanation",
    "IntegrationError",
    "NoRoom",
    "NotComparable",
    "NotStreamed",
    "NotTraced",
    "OptionError",
    "Options",
    "OverBudget",
    "PlanError",
    "PlanReport",
    "Profile",
    "ProfileError",
    "RanksDiffer",
    "ReportError",
    "RuleError",
    "StaleGraph",
    "StaleOutput",
    "StreamFXError",
    "TurnedOutput",
    "Verification",
    "check_recurrence",
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
    "streambp": "streamfx.backend",
    "Explanation": "streamfx.inspection.explain",
    "explain": "streamfx.inspection.explain",
    "Profile": "streamfx.inspection.profile",
    "profile": "streamfx.inspection.profile",
    "Verification": "streamfx.inspection.verify",
    "verify": "streamfx.inspection.verify",
    "Enabled": "streamfx.integrations",
    "disable": "streamfx.integrations",
    "enable": "streamfx.integrations",
    "plan": "streamfx.planner.plan",
    "PlanReport": "streamfx.planner.report",
    "check_recurrence": "streamfx.recurrence_laws",
    "register_recurrence": "streamfx.user_recurrences",
    "register_rule": "streamfx.user_rules",
}


def __getattr__(name: str) -> Any:
    """What is public and heavy, imported at its first use (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(_LAZY[name]), name)
    return found


def __dir__() -> list[str]:
    """What is public, and nothing of what it is made of."""
    return sorted([*__all__, "__version__"])
