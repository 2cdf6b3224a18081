"""Scans over rows that are one operator: what is carried, in which direction, and what is the same for all rows."""

from __future__ import annotations

from tests.mutations.row import Mutation

READ, RUN = "passes/canonicalization/scan_operators.py", "streamfx/runtime/scanned.py"
STREAMS = "test_scan_operators.py::test_rows_follow_one_another"
LAST = "test_scan_operators.py::test_the_last_state"

ROWS = (
    Mutation(
        "scans",
        "each chunk begins with the first state",
        RUN,
        "first if before == 0 else self._restored(carry)",
        "first",
        (STREAMS,),
    ),
    Mutation(
        "scans",
        "each chunk leaves its last state",
        RUN,
        "value if is_last else nothing_to_add(value.shape, value.dtype, value.device) for value in finals",
        "value for value in finals",
        (LAST,),
    ),
    Mutation(
        "scans",
        "rows from the last to the first are left in that order",
        RUN,
        "            steps.reverse()\n",
        "            pass\n",
        (STREAMS,),
    ),
    Mutation(
        "scans",
        "a step that draws is looked into",
        READ,
        "        and not is_random(node)\n",
        "",
        ("test_scan_operators.py::test_what_a_step_draws_is_not_looked_into",),
    ),
    Mutation(
        "scans",
        "what follows from the carry is the same for all rows",
        READ,
        "changing = descendants(call.step.inputs[:stop], call.step.operators)",
        "changing = descendants(call.step.inputs[start:stop], call.step.operators)",
        (STREAMS,),
    ),
    Mutation(
        "scans",
        "a step that reads by strides is looked into",
        READ,
        "        and node.target not in READS_LAYOUT\n",
        "",
        ("test_scan_operators.py::test_what_a_step_reads_by_strides_is_not_looked_into",),
    ),
    Mutation(
        "scans",
        "what one chunk alone makes is added to zeros",
        "streamfx/runtime/single_rows.py",
        "complex(-0.0, -0.0) if dtype.is_complex else -0.0",
        "0",
        (
            "test_scan_operators.py::test_signs_of_a_last_state_that_is_zero",
            "test_rows.py::test_it_streams[signs of a row that is zero]",
        ),
    ),
    Mutation(
        "scans",
        "complex numbers are added with a factor",
        "streamfx/runtime/sums.py",
        "    if total.is_complex():\n",
        "    if False:\n",
        ("test_rows.py::test_it_streams[both parts of complex rows]",),
    ),
    Mutation(
        "segments",
        "the fake result of a reverse scan lies as its operand does",
        "streamfx/runtime/scans.py",
        'register_fake(f"streamfx::reverse_{kind}", from_the_end(kind), lib',
        'register_fake(f"streamfx::reverse_{kind}", lambda rows, dim: torch.empty_like(rows), lib',
        ("test_bodies.py::test_the_fake_result_of_a_reverse_scan_lies_in_memory_as_the_real_one_does",),
    ),
)
