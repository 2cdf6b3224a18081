"""What reports draw: a peak that is lost on the way, and names that are read as markup."""

from __future__ import annotations

from tests.mutations.row import Mutation

ROWS = (
    Mutation(
        "reports",
        "an enabled model is compared with itself",
        "streamfx/inspection/untouched.py",
        "                _as_written(module)\n",
        "                pass\n",
        ("test_verify.py::test_eager_is_the_model_as_it_was_written",),
    ),
    Mutation(
        "reports",
        "few rows are compared in one chunk",
        "streamfx/inspection/verify.py",
        "compilations.append(InParts(module, given))",
        "compilations.append(Compilation(module, given))",
        ("test_verify.py::test_what_chunks_hand_on_is_seen_unless_a_size_was_given",),
    ),
    Mutation(
        "reports",
        "of neighbours the highest is dropped",
        "streamfx/cost/curve.py",
        "for pick in (max, min))",
        "for pick in (min,))",
        ("test_timeline.py::test_shortened_curves_keep_what_stands_out",),
    ),
    Mutation(
        "reports",
        "what a graph keeps for its backward half is not there while others run",
        "streamfx/inspection/curves.py",
        "        held += cost.held\n",
        "        held += 0\n",
        ("test_timeline.py::test_checkpointing_and_graph_breaks",),
    ),
    Mutation(
        "reports",
        "a loop that equals another is not drawn",
        "streamfx/cost/sampling.py",
        "self.meter.recorder.add(replace(known.curve.above(before, alive), loops=(drawn,)))",
        "self.meter.recorder.add(replace(known.curve.above(before, alive), loops=(drawn,), points=()))",
        ("test_timeline.py::test_equal_layers_are_drawn_though_one_of_them_ran",),
    ),
    Mutation(
        "reports",
        "a group of chunks takes the time of one",
        "streamfx/cost/sampling.py",
        "if part) for costs in kinds)",
        "if part) // len(chunks) for costs in kinds)",
        ("test_timeline.py::test_chunks_show_as_teeth",),
    ),
    Mutation(
        "reports",
        "names are markup",
        "streamfx/report/html.py",
        "autoescape=True",
        "autoescape=False",
        ("test_html.py::test_names_do_no_harm",),
    ),
    Mutation(
        "reports",
        "a quote ends a label",
        "streamfx/report/diagram.py",
        """.replace('"', '\\\\"')""",
        "",
        ("test_diagrams.py::test_labels_are_escaped",),
    ),
    Mutation(
        "reports",
        "a body's own constants are not handed to its class",
        "streamfx/report/bodies.py",
        'node.op in ("get_attr", "call_module")',
        'node.op == "get_attr"',
        ("test_bodies_as_python.py::test_printed_bodies_compute_what_loops_do",),
    ),
    Mutation(
        "reports",
        "a copy of layers reads itself where it should read the one before",
        "streamfx/inspection/all_layers.py",
        "        number += place.beside\n",
        "",
        ("test_plans_of_few_layers.py::test_a_plan_of_few_layers_is_that_of_all",),
    ),
    Mutation(
        "reports",
        "copies of layers share their values",
        "streamfx/inspection/all_layers.py",
        "            twins[id(value)] = fake_twin(value)\n",
        "            twins[id(value)] = value\n",
        ("test_plans_of_few_layers.py::test_a_plan_of_few_layers_is_that_of_all",),
    ),
    Mutation(
        "reports",
        "layers are not followed to see whether they do the same",
        "streamfx/inspection/same_layers.py",
        "    return all(every.stretches[i] == few.stretches[place] for i, place in enumerate(order))\n",
        "    return True\n",
        ("test_plans_of_few_layers.py::test_all_layers_are_traced_where_few_do_not_stand_for_them",),
    ),
)
