"""Training objectives as users write them, each a function from models and a batch to a number."""

from tests.support.objectives.models import Batch, Models, Objective, Step, batch_of
from tests.support.objectives.preferences import PREFERENCES
from tests.support.objectives.rewards import REWARDS
from tests.support.objectives.supervised import SUPERVISED
from tests.support.objectives.teachers import TEACHERS

OBJECTIVES: dict[str, Objective] = {
    objective.__name__: objective for objective in (*SUPERVISED, *PREFERENCES, *REWARDS, *TEACHERS)
}

__all__ = ["OBJECTIVES", "Batch", "Models", "Objective", "Step", "batch_of"]
