"""What few layers tell of all, and one length of others: taken for told where it is not."""

from __future__ import annotations

from tests.mutations.row import Mutation

ANALYSED, SEARCH = "streamfx/inspection/analysed.py", "test_plan_search.py"
TOLD = "test_few_layers.py::test_few_layers_tell_what_is_found_in_all"
ONE_PIECE, NEVER_MORE = "passes/partition/in_one_piece.py", "test_never_more.py::test_what_any_run_in_one_piece_holds"
NO_MORE = "test_never_more.py::test_no_more_than_without"

ROWS = (
    Mutation(
        "plans",
        "masks that are no longer read belong to no half",
        ANALYSED,
        "joint=replace(joint, forward=self._among(facts.joint.forward)),",
        "joint=joint,",
        (TOLD,),
    ),
    Mutation(
        "plans",
        "attentions of all copies of a layer are one group",
        ANALYSED,
        "            is_own = number is None or id(span) in shared\n",
        "            is_own = True\n",
        (TOLD,),
    ),
    Mutation(
        "plans",
        "what is found of two periods may differ",
        ANALYSED,
        "            if _found_of(before, facts) != _found_of(after, facts):\n",
        "            if _found_of(before, facts) is None:\n",
        ("test_few_layers.py::test_periods_of_which_something_else_is_found_tell_nothing",),
    ),
    Mutation(
        "plans",
        "few layers tell which of two axes is the sequence, whatever others say",
        ANALYSED,
        "    if _voted(facts.axes) != {facts.axes.sequence.main} or not is_unanimous(facts):\n",
        "    if not is_unanimous(facts):\n",
        ("test_few_layers.py::test_what_belongs_to_a_graph_as_a_whole_is_looked_for_in_all",),
    ),
    Mutation(
        "plans",
        "only the moment of the peak is asked where it would reach the limit",
        "streamfx/planner/growth.py",
        "    return [found.peak_by_term] if curve is None else [point.terms for point in curve[0].points]\n",
        "    return [found.peak_by_term]\n",
        (f"{SEARCH}::test_each_moment_is_asked_where_it_would_reach_the_limit",),
    ),
    Mutation(
        "plans",
        "the work on a chunk is taken not to grow",
        "streamfx/planner/search.py",
        "            growth = work(size, found, far)\n",
        "            pass\n",
        (f"{SEARCH}::test_few_layers_show_how_the_work_on_a_chunk_grows",),
    ),
    Mutation(
        "plans",
        "what the user's code recomputes is kept in one piece",
        ONE_PIECE,
        ' and "recompute" not in source.meta',
        "",
        (f"{NEVER_MORE}[recomputed]",),
    ),
    Mutation(
        "plans",
        "a mask that the forward half may keep keeps its product",
        ONE_PIECE,
        "for node in nodes if node in on_gradients]",
        "for node in nodes if node not in joint.forward]",
        (f"{NEVER_MORE}[mask]",),
    ),
    Mutation(
        "plans",
        "an operator with a saved state of random numbers is taken for one without a result",
        "streamfx/cost/stand_ins.py",
        'if "val" not in node.meta and (inner',
        "if False and (inner",
        ("test_never_more.py::test_no_more_than_with_checkpoints_around_attention[0]",),
    ),
    Mutation(
        "plans",
        "a graph without loops runs the default partition, whatever it takes",
        ONE_PIECE,
        "    return not asks and",
        "    return facts.program is not None and not asks and",
        (f"{NO_MORE}[no_sequence]",),
    ),
    Mutation(
        "plans",
        "of halves with equal peaks those run that keep more for each other",
        ONE_PIECE,
        "key=lambda one: one.cost.held)",
        "key=lambda one: 0)",
        (f"{NO_MORE}[experts]",),
    ),
    Mutation(
        "plans",
        "loops run where no longer call can be followed",
        ONE_PIECE,
        " and all(held):",
        " and False:",
        ("test_never_more.py::test_lengths_that_no_call_exceeds",),
    ),
    Mutation(
        "plans",
        "what stands for a deferred output on the meta device has memory",
        "streamfx/cost/meter.py",
        '        if value.device.type != "meta":\n',
        "        if True:\n",
        ("test_never_more.py::test_deferred_outputs_count_once_they_are_made",),
    ),
    Mutation(
        "plans",
        "a mask that only data will tell is one piece",
        "streamfx/runtime/attention.py",
        "is_open = isinstance(query, FakeTensor)",
        "is_open = False and isinstance(query, FakeTensor)",
        ("test_never_more.py::test_no_documents_take_more_than_was_predicted",),
    ),
)
