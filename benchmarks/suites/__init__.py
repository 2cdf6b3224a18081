"""What is compared with what: one file per suite, each a function from `Settings` to the rows of a table."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.settings import Rows, Settings
from benchmarks.suites.analysis import analysis
from benchmarks.suites.compilation import compilation
from benchmarks.suites.first_step import first_step
from benchmarks.suites.growth import growth
from benchmarks.suites.head import head
from benchmarks.suites.host import host
from benchmarks.suites.longest import longest
from benchmarks.suites.masks import masks
from benchmarks.suites.mlp import mlp
from benchmarks.suites.objectives import objectives
from benchmarks.suites.operations import operations
from benchmarks.suites.peers import peers
from benchmarks.suites.recurrences import recurrences
from benchmarks.suites.short import short
from benchmarks.suites.showcases import showcases
from benchmarks.suites.step import step
from benchmarks.suites.trainer_run import trainer_run

SUITES: dict[str, Callable[[Settings], Rows]] = {
    suite.__name__: suite
    for suite in (
        *(step, masks, objectives, head, mlp, longest, operations, growth, recurrences),
        *(compilation, analysis, first_step, host, short, peers, showcases, trainer_run),
    )
}
