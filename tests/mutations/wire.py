"""What a step is said to send to other ranks, and to wait for."""

from __future__ import annotations

from tests.mutations.row import Mutation

COST, REPORT, OVERLAP = "streamfx/cost/wire.py", "streamfx/report/wire.py", "streamfx/planner/overlap.py"
BETWEEN, TERMS = "streamfx/cost/between.py", ("test_plan_sharded.py::test_what_lies_between_loops_has_terms_of_its_own",)
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
        "*(part.reduced for part in before)",
        "*(part.reduced for part in parts[max(i, 0) : i + 1])",
        ("test_plan_sharded.py::test_a_stage_takes_the_longer_of_loops_and_wire",),
    ),
    Mutation(
        "wire",
        "what goes to the host is copied beside the loops that make it",
        OVERLAP,
        "sum(part.copies.left for part in before)",
        "sum(part.copies.left for part in parts[max(i, 0) : i + 1])",
        ("test_plan_sharded.py::test_copies_take_what_loops_and_wire_leave_over",),
    ),
    Mutation(
        "wire",
        "copies are waited for beside a wire that is waited for",
        OVERLAP,
        "seconds.copied(copies) - free - late",
        "seconds.copied(copies) - free",
        ("test_plan_sharded.py::test_copies_take_what_loops_and_wire_leave_over",),
    ),
    Mutation(
        "wire",
        "rows that are laid out behind an exchange are something else",
        BETWEEN,
        "_moves(node) and not found.isdisjoint(node.all_input_nodes)",
        "False",
        TERMS,
    ),
    Mutation(
        "wire",
        "a stage's input that is written over stays one",
        "streamfx/cost/sampling.py",
        "        if item.reuse is not None:\n            self.meter",
        "        if False:\n            self.meter",
        ("test_plan.py::test_memory_that_is_written_over_counts_as_what_it_holds",),
    ),
    Mutation(
        "wire",
        "an optimizer in the backward pass frees nothing before its end",
        "streamfx/cost/handed_over.py",
        "if number >= handed.first:",
        "if number + 1 >= len(handed.stretches):",
        ("test_plan_sharded.py::test_the_peak_is_that_of_a_run",),
    ),
    Mutation(
        "wire",
        "a group is near where its first ranks are",
        COST,
        "members[-1] // TOGETHER",
        "members[1] // TOGETHER",
        ("test_plan_sharded.py::test_which_groups_lie_inside_of_a_machine",),
    ),
)
