"""What a person is told: reasons that depend on what ran before, arguments that are taken in silence."""

from __future__ import annotations

from tests.mutations.row import Mutation

ROWS = (
    Mutation(
        "told",
        "functions that Dynamo gave up in an earlier call are not tried again",
        "streamfx/torch_private/dynamo.py",
        "set_code_exec_strategy(code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))",
        "pass",
        ("test_traced_in_part.py::test_why_a_trace_breaks_does_not_depend_on_earlier_calls",),
    ),
)
