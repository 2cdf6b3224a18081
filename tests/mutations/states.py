"""Operators with a state: which state a chunk begins with, what it leaves, what a call has to be for that to hold."""

from __future__ import annotations

from tests.mutations.row import Mutation

PLAN, RUN = "streamfx/ir/scan_schema.py", "streamfx/runtime/custom_scan.py"
READ, EMIT, AXIS = "passes/rewrite/scans/custom_scan.py", "passes/lowering/running_lowerings.py", "streamfx/ir/facts.py"
CONVOLUTION, PACKED = "streamfx/kernels/causal_conv.py", "passes/rewrite/scans/causal_conv1d.py"
STREAMS = "test_stateful.py::test_rows_follow_one_another"
BLOCKS = "test_stateful.py::test_inside_of_blocks_it_runs_whole"
CALLS, PACKAGE = "test_register_recurrence.py", "test_causal_conv_package.py"


def fault(what: str, file: str, before: str, after: str, *tests: str) -> Mutation:
    return Mutation("states", what, file, before, after, tests)


ROWS = (
    fault(
        "each chunk begins with the first state",
        RUN,
        "first = started(self.plan, own, carry) if before == 0 else restored(self.plan, carry)",
        "first = started(self.plan, own, carry)",
        STREAMS,
    ),
    fault(
        "each chunk of the backward begins with the gradient of the last state",
        RUN,
        "left = started(self.plan, own, carry) if before == 0 else restored(self.plan, carry)",
        "left = started(self.plan, own, carry)",
        f"{STREAMS}[last_state_for_all_rows]",
        STREAMS,
    ),
    fault(
        "each chunk leaves its last state",
        RUN,
        "state.to(part.dtype) if has_last else nothing_to_add(state.shape, part.dtype, state.device)",
        "state.to(part.dtype)",
        f"{STREAMS}[last_state_for_all_rows]",
    ),
    fault(
        "chunks without rows leave a last state, too",
        RUN,
        "has_last = after == 0 and (count > 0 or (before == 0 and chunk == 0))",
        "has_last = after == 0",
        f"{STREAMS}[of_the_first_rows]",
    ),
    fault(
        "the backward of a chunk begins with the state of the first",
        RUN,
        "restored(self.plan.again, states[chunk])}",
        "restored(self.plan.again, states[0])}",
        STREAMS,
    ),
    fault(
        "a call is given as many rows as all chunks have",
        RUN,
        "rows_of(plan, values) if count is None else count)",
        "7)",
        f"{STREAMS}[averaged]",
    ),
    fault(
        "operands lie as they come",
        RUN,
        "dense = value.permute(order).contiguous()",
        "dense = value.permute(order)",
        "test_stateful.py::test_rows_lie_as_they_did_when_they_were_traced",
    ),
    fault(
        "flags are left as a call gives them",
        RUN,
        "        given |= plan.always\n",
        "        pass\n",
        f"{STREAMS}[in_blocks]",
        f"{STREAMS}[of_a_package]",
    ),
    fault(
        "chunks begin inside of blocks",
        AXIS,
        "lcm(*self.blocks.values(), *self.together)",
        "lcm(*self.blocks.values())",
        f"{STREAMS}[in_blocks]",
    ),
    fault(
        "blocks begin where chunks do, whatever rows there are",
        EMIT,
        "own.offset % run.block)",
        "False)",
        BLOCKS,
    ),
    fault(
        "a wider state is rounded",
        PLAN,
        "    if torch.promote_types(state.dtype, last.dtype) != last.dtype:\n",
        "    if False:\n",
        f"{CALLS}::test_a_state_of_a_type_that_the_carry_does_not_hold",
    ),
    fault(
        "what was saved is read by others as well",
        READ,
        "{user for part in users for user in takers(part)} - own",
        "set()",
        f"{CALLS}::test_a_saved_result_that_others_read",
    ),
    fault(
        "results are what they are where a state is asked for",
        READ,
        "shape_of(value) != shape_of(now) or value.dtype != now.dtype",
        "False",
        f"{CALLS}::test_a_result_that_is_another_without_the_flag",
    ),
    fault(
        "any backward is a call's",
        READ,
        "return is_given_the_same and all(",
        "return all(",
        f"{CALLS}::test_a_backward_with_other_operands",
    ),
    fault(
        "a backward is of the first call that fits",
        READ,
        "if other.arguments != call.arguments and",
        "if False and",
        f"{CALLS}::test_calls_that_differ_in_what_the_backward_is_not_given",
    ),
    fault(
        "a chunk's first rows see none of those before",
        CONVOLUTION,
        "    seen = x if first is None else torch.cat((first, x), 2)\n",
        "    seen = x if first is None else torch.cat((first * 0, x), 2)\n",
        f"{PACKAGE}::test_it_streams",
    ),
    fault(
        "sequences in a row are one",
        PACKED,
        'BEYOND = ("seq_idx", "initial_states")',
        'BEYOND = ("initial_states",)',
        f"{PACKAGE}::test_sequences_in_a_row_run_whole",
    ),
)
