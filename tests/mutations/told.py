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
    Mutation(
        "told",
        "the lengths that are looked at for a gain are multiples of what was asked for",
        "streamfx/planner/gain.py",
        "        at = named(high, multiple)\n",
        "        at = length * named(high, multiple)\n",
        (
            "test_plan_verdict.py::test_a_plan_names_the_same_length_whatever_was_asked_for",
            "test_plan_verdict.py::test_from_where_on_there_is_a_gain_does_not_depend_on_the_length_that_was_asked_for",
        ),
    ),
    Mutation(
        "told",
        "inputs of one length are planned as any length",
        "streamfx/planner/inputs.py",
        "refuse_unless(found != sizes, PlanError,",
        "refuse_unless(True, PlanError,",
        ("test_bad_arguments.py::test_wrong_calls",),
    ),
    Mutation(
        "told",
        "the first dimension of the first tensor is said to be the batch",
        "streamfx/planner/step.py",
        "            found = replace(found, batch=batch)\n",
        "            pass\n",
        ("test_plan.py::test_inputs_of_a_models_own_are_as_many_as_was_asked_for",),
    ),
    Mutation(
        "told",
        "arrays are taken for tensors",
        "streamfx/inspection/explain.py",
        "refuse_unless(not arrays, NotTraced,",
        "refuse_unless(True, NotTraced,",
        ("test_bad_arguments.py::test_wrong_calls",),
    ),
    Mutation(
        "told",
        "keys of the parts of a configuration are not looked at",
        "streamfx/planner/misspelt.py",
        "            yield from misspelt_in(value, own)\n",
        "            pass\n",
        ("test_plan.py::test_keys_that_are_nearly_known_are_refused",),
    ),
    Mutation(
        "told",
        "a configuration with a key that is nearly a known one is planned",
        "streamfx/planner/misspelt.py",
        "key not in known and (meant := _meant(key, missing))",
        "key not in known and (meant := None)",
        ("test_plan.py::test_keys_that_are_nearly_known_are_refused",),
    ),
    Mutation(
        "told",
        "calls are counted as compiled where nothing is",
        "streamfx/integrations/calls.py",
        "generates(kwargs) or self.is_off:",
        "generates(kwargs):",
        ("test_switched_off.py::test_calls_are_counted_as_what_they_are",),
    ),
    Mutation(
        "told",
        "a layer that is enabled is called a whole model",
        "streamfx/integrations/targets.py",
        "WHOLE if is_given_alone else OF_TRAINER",
        "OF_TRAINER",
        ("test_switched_off.py::test_a_part_of_a_model_is_not_called_the_whole",),
    ),
    Mutation(
        "told",
        "a page does not say why nothing is compared with checkpoints",
        "streamfx/inspection/page.py",
        '    if summary["not_checkpointed"]:\n',
        "    if False:\n",
        ("test_html.py::test_a_page_says_what_the_text_says",),
    ),
    Mutation(
        "told",
        "what compiles a first step is not told from what runs it",
        "streamfx/inspection/profile.py",
        "watch.ran, unseen, compiled)",
        "watch.ran, unseen)",
        ("test_profile.py::test_a_first_step_says_how_long_it_compiled",),
    ),
)
