"""Operators with a state: which state a chunk begins with, what it leaves, what a call has to be for that to hold."""

from __future__ import annotations

from tests.mutations.row import Mutation

PLAN, RUN = "streamfx/ir/stateful.py", "streamfx/runtime/stateful.py"
READ, EMIT, AXIS = "passes/canonicalization/stateful_operators.py", "passes/codegen/running.py", "streamfx/ir/facts.py"
CONVOLUTION, PACKED = "streamfx/runtime/causal_convolutions.py", "passes/canonicalization/convolution_package.py"
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
        f"{STREAMS}[last state for all rows]",
        STREAMS,
    ),
    fault(
        "each chunk leaves its last state",
        RUN,
        "state.to(part.dtype) if has_last else nothing_to_add(state.shape, part.dtype, state.device)",
        "state.to(part.dtype)",
        f"{STREAMS}[last state for all rows]",
    ),
    fault(
        "chunks without rows leave a last state, too",
        RUN,
        "has_last = after == 0 and (count > 0 or (before == 0 and chunk == 0))",
        "has_last = after == 0",
        f"{STREAMS}[of the first rows]",
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
        f"{STREAMS}[in blocks]",
        f"{STREAMS}[of a package]",
    ),
    fault(
        "chunks begin inside of blocks",
        AXIS,
        "lcm(*self.blocks.values(), *self.together)",
        "lcm(*self.blocks.values())",
        f"{STREAMS}[in blocks]",
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
        f"{CALLS}::test_what_a_declaration_does_not_hold_for_runs_whole[a wide state]",
    ),
    fault(
        "what was saved is read by others as well",
        READ,
        "{user for part in users for user in takers(part)} - own",
        "set()",
        f"{CALLS}::test_what_a_declaration_does_not_hold_for_runs_whole[a saved result that others read]",
    ),
    fault(
        "results are what they are where a state is asked for",
        READ,
        "shape_of(value) != shape_of(now) or value.dtype != now.dtype",
        "False",
        f"{CALLS}::test_what_a_declaration_does_not_hold_for_runs_whole[a result that is another without the flag]",
    ),
    fault(
        "any backward is a call's",
        READ,
        "return is_given_the_same and all(",
        "return all(",
        f"{CALLS}::test_what_a_declaration_does_not_hold_for_runs_whole[another backward]",
    ),
    fault(
        "a backward is of the first call that fits",
        READ,
        "if other.arguments != call.arguments and",
        "if False and",
        f"{CALLS}::test_what_a_declaration_does_not_hold_for_runs_whole[calls that differ in what the backward is not given]",
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
