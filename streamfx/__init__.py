"""streamfx: a `torch.compile` backend that streams any decoder along its sequence."""

from streamfx.backend import streambp
from streamfx.errors import (
    IntegrationError,
    NoRoom,
    NotComparable,
    NotStreamed,
    NotTraced,
    OptionError,
    OverBudget,
    PlanError,
    RanksDiffer,
    ReportError,
    RuleError,
    StaleGraph,
    StaleOutput,
    StreamFXError,
    TurnedOutput,
)
from streamfx.inspection.explain import Explanation, explain
from streamfx.inspection.verify import Verification, verify
from streamfx.options import Options, configure
from streamfx.planner.plan import plan
from streamfx.planner.report import PlanReport
from streamfx.user_rules import register_rule

__version__ = "0.1.0"

__all__ = [
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
    "RanksDiffer",
    "ReportError",
    "RuleError",
    "StaleGraph",
    "StaleOutput",
    "StreamFXError",
    "TurnedOutput",
    "Verification",
    "configure",
    "explain",
    "plan",
    "register_rule",
    "streambp",
    "verify",
]
