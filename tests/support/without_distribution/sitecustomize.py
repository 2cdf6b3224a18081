"""A Python as on a machine where nothing of this project is installed: no metadata of streamfx, so no entry points, and no rich.

A process finds this file on PYTHONPATH and runs it when it starts; so do the processes that it starts.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import DistributionFinder, PathDistribution
from types import ModuleType

HIDDEN_MODULES, HIDDEN_DISTRIBUTIONS = ("rich",), ("streamfx", "rich")
EVERYTHING = DistributionFinder.Context()


class Finder(PathFinder):
    """Finds all modules but the hidden ones."""

    @classmethod
    def find_spec(cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return None if fullname.split(".")[0] in HIDDEN_MODULES else super().find_spec(fullname, path, target)

    @staticmethod
    def find_distributions(context: DistributionFinder.Context = EVERYTHING) -> list[PathDistribution]:
        found = PathFinder.find_distributions(context)
        return [one for one in found if one.metadata["Name"] not in HIDDEN_DISTRIBUTIONS]


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
