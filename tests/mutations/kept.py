"""What is kept between two looks: agreement of passes, state of runs, changes that are told, lengths, settings."""

from __future__ import annotations

from tests.mutations.row import Mutation

BACKEND, FINGERPRINT, OPTIONS = "streamfx/backend.py", "streamfx/fingerprint.py", "streamfx/options.py"
USES = "streamfx/lazy/uses.py"
WATCHED = "test_watched_buffers.py::test_the_next_call_is_exact"

PASSES = (
    Mutation(
        "4",
        "uses of deferred outputs cut as the model did",
        USES,
        ", chunk_size=cut.rows, loss_chunk_size=cut.rows)",
        ")",
        ("test_uses_of_outputs.py::test_what_was_found_is_found_again",),
    ),
    Mutation(
        "4",
        "a use that cuts otherwise streams",
        USES,
        "        if not is_cut(known(facts), cut):\n",
        "        if False:\n",
        ("test_uses_of_outputs.py::test_a_use_that_streams_along_another_axis_makes_all_of_it_whole",),
    ),
    Mutation(
        "4",
        "each look at deferred outputs decides anew how they are made",
        "streamfx/lazy/rebuild.py",
        "            self.in_chunks = in_chunks if self.in_chunks is None else self.in_chunks\n            return self.in_chunks",
        "            return in_chunks",
        ("test_uses_of_outputs.py::test_what_was_found_is_found_again",),
    ),
    Mutation(
        "4",
        "rows alone are made in as many as are asked for",
        "streamfx/lazy/in_chunks.py",
        "        first = max(0, min(start, stop - 2)) // step * step  # a single row is no sequence\n"
        "        last = min(source.length, -(-stop // step) * step)\n",
        "        first, last = start, stop\n",
        ("test_uses_of_outputs.py::test_what_was_found_is_found_again",),
    ),
)
STATE = (
    Mutation(
        "5",
        "draws are made by the process's generator",
        "streamfx/runtime/rng.py",
        'generator = torch.Generator(device or "cpu")',
        "generator = torch.default_generator",
        ("test_threads.py::test_draws_leave_the_generator_alone",),
    ),
    Mutation(
        "5",
        "what a run finds of its masks is the program's",
        "streamfx/runtime/mask_programs.py",
        "return Mask(self, inputs, _looks.get() or Looks())",
        'return Mask(self, inputs, self.__dict__.setdefault("looks", Looks()))',
        ("test_visible.py::test_a_mask_is_looked_at_once_per_chunk",),
    ),
    Mutation(
        "5",
        "a backward half finds nothing of what its forward half found",
        "streamfx/runtime/outer.py",
        "        if isinstance(value, Tensor) and id(value) not in others:\n",
        "        if False:\n",
        ("test_bodies.py::test_a_step_with_a_mask_of_data_waits_once",),
    ),
    Mutation(
        "5",
        "a run keeps its values",
        "streamfx/runtime/outer.py",
        "        return self._function(arguments)",
        "        self.kept = list(arguments)\n        return self._function(arguments)",
        ("test_threads.py::test_a_run_keeps_nothing",),
    ),
)
CHANGES = (
    Mutation(
        "6",
        "values past the version counter are never another's (one tensor)",
        FINGERPRINT,
        "same = torch.equal(checksum(tensor), self.sums)",
        "same = True",
        ("test_deferral.py::test_a_change_is_noticed",),
    ),
    Mutation(
        "6",
        "values past the version counter are never another's (all watched)",
        FINGERPRINT,
        "return any(bool(torch.stack(flags).any()) for flags in differ.values())",
        "return False",
        (WATCHED,),
    ),
    Mutation(
        "6",
        "a frozen weight is told by its version alone",
        "streamfx/constants.py",
        "return self.seen.sums is not None or tensor.data_ptr() == self.address",
        "return True",
        ("test_watched_buffers.py::test_a_frozen_weight_that_is_not_read_is_told_by_its_memory",),
    ),
    Mutation(
        "6",
        "words are summed without factors",
        FINGERPRINT,
        "_factors(block.device)[:columns]",
        "1 | _factors(block.device)[:columns] * 0",
        ("test_fingerprint.py::test_contents_that_are_alike_are_told_apart",),
    ),
    Mutation(
        "6",
        "words are summed in 32 bits",
        FINGERPRINT,
        "        return (whole | 1).to(device)",
        "        return (whole | 1).to(torch.int32).to(device)",
        ("test_fingerprint.py::test_pairs_of_signs_are_told_apart",),
    ),
    Mutation(
        "6",
        "versions of weights are not looked at",
        FINGERPRINT,
        "return None not in (self.version, version) and version != self.version",
        "return False",
        ("test_deferral.py::test_a_changed_parameter_is_noticed",),
    ),
)
LENGTHS = (
    Mutation(
        "12",
        "a plan holds for all lengths",
        "streamfx/ir/lengths.py",
        "                bool(size <= self.numbers[symbol])  # torch notes what it was asked, as a guard of the graph",
        "                _ = size",
        ("test_lengths.py::test_what_fits_whole_for_one_length_does_not_for_all",),
    ),
    Mutation(
        "12",
        "what fits now fits without a look at longer ones",
        BACKEND,
        "        furthest = now.furthest_beyond(fits) if fits(now) else None\n",
        "        furthest = now.times(64)\n",
        ("test_lengths.py::test_what_fits_whole_for_one_length_does_not_for_all",),
    ),
    Mutation(
        "12",
        "two plans hold for the longest lengths of either",
        "streamfx/ir/lengths.py",
        "symbol: min(number, other.numbers.get(symbol, number))",
        "symbol: max(number, other.numbers.get(symbol, number))",
        ("test_lengths.py::test_parts_of_a_plan_hold_for_the_lengths_that_both_hold_for",),
    ),
)
SETTINGS = (
    Mutation(
        "13",
        "a block's options are the process's",
        OPTIONS,
        "        _of_context.set((*_of_context.get(), self._blocks[-1]))",
        "        _of_process.append(self._blocks[-1])",
        ("test_configure.py::test_blocks_left_in_another_order_than_entered",),
    ),
    Mutation(
        "13",
        "a block that is left in another context stays on",
        OPTIONS,
        "        left.is_open = False  # where",
        "        left.is_open = True  # where",
        ("test_configure.py::test_a_block_that_is_left_in_another_context_is_off",),
    ),
    Mutation(
        "13",
        "what a block is about to set is the process's",
        OPTIONS,
        "            layer.decided.wait(1.0)\n",
        "",
        ("test_configure.py::test_a_thread_waits_until_it_is_known_whether_a_block_follows",),
    ),
    Mutation(
        "13",
        "seeds are drawn on the default device",
        "streamfx/runtime/rng.py",
        'return torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu")',
        "return torch.randint(0, 2**62, (), dtype=torch.int64)",
        ("test_configure.py::test_seeds_are_drawn_on_the_cpu",),
    ),
)
ROWS = (*PASSES, *STATE, *CHANGES, *LENGTHS, *SETTINGS)
