"""Copies to and from the host: which stream waits for which, whose memory is alive how long, and who may read it."""

from __future__ import annotations

from tests.mutations.row import Mutation

OFFLOAD, PINNED, COPIES = "streamfx/runtime/offload.py", "streamfx/runtime/pinned.py", "passes/lowering/copies.py"
TWO, EXCEPTION = "test_copies.py::test_two_inputs_are_alive_at_most", "test_copies.py::test_an_exception_in_the_middle"

ROWS = (
    Mutation(
        "copies",
        "a copy begins before what it copies is there, or before its room is free",
        OFFLOAD,
        "        self.stream.wait_stream(compute)\n",
        "",
        (TWO,),
    ),
    Mutation(
        "copies",
        "a fetched value is read before it has come",
        OFFLOAD,
        "        copy.wait(BESIDE[value.device.type].current_stream(value.device))\n    return value\n",
        "        copy.is_waited_for = True\n    return value\n",
        (TWO,),
    ),
    Mutation(
        "copies",
        "memory of a value is used again before it was copied",
        OFFLOAD,
        "        copy.wait(BESIDE[value.device.type].current_stream(value.device))\n        if saved",
        "        copy.is_waited_for = True\n        if saved",
        (TWO,),
    ),
    Mutation(
        "copies",
        "an exception leaves a copy that writes into memory of others",
        OFFLOAD,
        "        if not self.is_waited_for:\n",
        "        if False:\n",
        (EXCEPTION,),
    ),
    Mutation(
        "copies",
        "a value whose copy nobody waits for may die",
        OFFLOAD,
        "source if keeps else None",
        "None",
        ("test_pinned.py::test_what_is_not_registered_is_pinned_by_torch",),
    ),
    Mutation(
        "copies",
        "memory of the device is taken on the copy stream",
        OFFLOAD,
        "        value = torch.empty_like(held, device=value.device).copy_(value)\n",
        "        pass\n",
        ("test_pinned.py::test_values_with_gaps",),
    ),
    Mutation(
        "copies",
        "hooks are given what has not been copied yet",
        OFFLOAD,
        "if saved_tensors_are_packed():",
        "if False:",
        ("test_copies.py::test_hooks_may_read_what_is_saved",),
    ),
    Mutation(
        "copies",
        "values are fetched two stages ahead",
        COPIES,
        "runs.begin(max(runs.number[users[0]] - 1, 0))",
        "runs.begin(max(runs.number[users[0]] - 2, 0))",
        (TWO,),
    ),
    Mutation(
        "copies",
        "values are fetched when they are needed",
        COPIES,
        "runs.begin(max(runs.number[users[0]] - 1, 0))",
        "runs.begin(runs.number[users[0]])",
        ("test_copies.py::test_copies_run_beside_the_loops_of_a_stage",),
    ),
    Mutation(
        "copies",
        "a value is freed one stage later than it could be",
        COPIES,
        "runs.begin(runs.number[value] + 2)",
        "runs.begin(runs.number[value] + 3)",
        (TWO,),
    ),
    Mutation(
        "copies",
        "a value that several runs read stays in between",
        COPIES,
        "> runs.number[group[-1]] + 2:",
        "> runs.number[group[-1]] + 200:",
        ("test_offload_attention.py::test_each_value_is_fetched_for_the_runs_that_read_it",),
    ),
    Mutation(
        "copies",
        "blocks of the host pile up",
        PINNED,
        "        self._shrink(self.in_use + rounded)\n",
        "",
        ("test_pinned.py::test_blocks_of_all_lengths_do_not_pile_up",),
    ),
    Mutation(
        "copies",
        "memory is given back to the system while it is copied to",
        PINNED,
        "        self.stream.synchronize()  # see NOTE [When a block is used again]\n",
        "",
        ("test_pinned.py::test_memory_is_given_back_when_copies_are_done",),
    ),
    Mutation(
        "copies",
        "an error of CUDA that was answered is raised by the next launch",
        PINNED,
        "        forget_error(self.device)\n",
        "",
        ("test_pinned.py::test_what_is_not_registered_is_pinned_by_torch",),
    ),
    Mutation(
        "copies",
        "plans count bytes, and not pages",
        "streamfx/tools/planner/host_memory.py",
        'bytes_pinned(bytes_like(node.meta["val"]))',
        'bytes_like(node.meta["val"])',
        ("test_copies.py::test_blocks_of_the_host_are_those_of_the_plan",),
    ),
    Mutation(
        "copies",
        "results of attention stay on the device",
        "passes/partition/chunk_plan.py",
        "        kept = self._at(self.options.offload, facts, between)\n",
        '        kept = self._at("inputs", facts, between)\n',
        ("test_offload_attention.py::test_attention_is_not_run_twice_and_stays_nowhere",),
    ),
)
