"""Truncated adjoints: what is begun anew behind each chunk, what is carried whole, and for how many chunks."""

from __future__ import annotations

from tests.mutations.row import Mutation

FOUND, RUN = "passes/scan/truncated_bptt.py", "streamfx/runtime/truncated.py"
REACH = "test_truncated_adjoints.py::test_gradients_reach_back_so_many_rows"
PAPER = "test_truncated_adjoints.py::test_equation_7_of_the_paper"

ROWS = (
    Mutation(
        "truncations",
        "one chunk more is reached",
        RUN,
        "chunks_holding(self.reach - 1, STEP)",
        "chunks_holding(self.reach, STEP)",
        (PAPER,),
    ),
    Mutation(
        "truncations",
        "sums of rows are begun anew, too",
        FOUND,
        "    adjoint_values -= _totals(steps)\n",
        "",
        (REACH,),
    ),
    Mutation(
        "truncations",
        "a step's sums are begun anew, too",
        FOUND,
        "if place in adjoint_values and not _is_total(place, left, results)",
        "if place in adjoint_values",
        (REACH,),
    ),
    Mutation(
        "truncations",
        "what is left to each chunk is what the next has seen",
        RUN,
        "own[start:stop].copy_(carry[chunks - 1, start:stop])",
        "own[start:stop].copy_(carry[chunks, start:stop])",
        (REACH,),
    ),
    Mutation(
        "truncations",
        "rows get the gradients of their own chunk",
        RUN,
        "return results[0]",
        "return results[-1]",
        (REACH,),
    ),
)
