"""What a step is said to send to other ranks, and to wait for."""

from __future__ import annotations

from tests.mutations.row import Mutation

COST, REPORT, OVERLAP = "streamfx/cost/wire.py", "streamfx/report/wire.py", "streamfx/planner/overlap.py"
CALL, STEP = "test_wire.py::test_bytes_of_a_call", "test_wire.py::test_wire"

ROWS = (
    Mutation(
        "wire",
        "an all-reduce sends as much as a scatter",
        COST,
        "(2 if name == ALL_REDUCE else 1) * whole",
        "whole",
        (CALL,),
    ),
    Mutation("wire", "a gather sends a part of a shard", COST, "result if kind == GATHERS else args[0]", "args[0]", (CALL,)),
    Mutation(
        "wire",
        "reductions behind the last loop are early",
        REPORT,
        "for node in order[:last])",
        "for node in order)",
        (STEP,),
    ),
    Mutation(
        "wire",
        "a gradient is reduced beside the loops that make it",
        OVERLAP,
        "(parts[i - 1].reduced if i else 0)",
        "part.reduced",
        ("test_plan_sharded.py::test_a_stage_takes_the_longer_of_loops_and_wire",),
    ),
)
