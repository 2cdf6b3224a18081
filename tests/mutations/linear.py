"""Linear maps that are none, and casts that change numbers."""

from __future__ import annotations

from tests.mutations.row import Mutation

TABLE, ROW_NUMBERS = "passes/ops/linearity.py", "passes/rewrite/views/iota_index.py"
EXPERTS = "passes/rewrite/moe/expert_mm.py"
ROW = "test_canonical.py::test_row"
NO_MULTIPLE = "test_multiples.py::test_no_multiple"

LINEAR = (
    Mutation(
        "8",
        "numbers beside what drives are nothing",
        TABLE,
        "all(item in driven or _is_nothing(item) for item in _leaves(",
        "all(not isinstance(item, fx.Node) or item in driven or _is_nothing(item) for item in _leaves(",
        ("test_linearity.py::test_hooks_on_logits",),
    ),
    Mutation(
        "8",
        "a sum is linear whatever type it is made in",
        TABLE,
        "return value is None or (isinstance(value, torch.dtype) and value.is_floating_point)",
        "return True",
        ("test_linearity.py::test_linear",),
    ),
    Mutation(
        "8",
        "an argument that a theorem does not name may be anything",
        TABLE,
        "            argument.has_default_value() and type(value) is type(argument.default_value)"
        " and value == argument.default_value\n",
        "            True\n",
        ("test_linearity.py::test_an_argument_that_no_row_names",),
    ),
    Mutation(
        "8",
        "any type reaches as far as a gradient does",
        TABLE,
        "return reaches and _digits(dtype) >=",
        "return _digits(dtype) >=",
        ("test_linearity.py::test_types_that_carry",),
    ),
    Mutation(
        "8",
        "any type has the digits of a gradient",
        TABLE,
        "return reaches and _digits(dtype) >= max(needed, _digits(torch.bfloat16))",
        "return reaches",
        ("test_linearity.py::test_types_that_carry",),
    ),
    Mutation(
        "8",
        "rows are driven through what mixes them",
        "passes/analysis/homogeneity.py",
        "        return not signature.is_special(letter) and all(",
        "        return all(",
        (NO_MULTIPLE,),
    ),
)
CASTS = (
    Mutation(
        "9",
        "any type holds row numbers",
        ROW_NUMBERS,
        "return all(not dtype.is_floating_point and is_exact_in(dtype, 0, longest(rows)) for dtype in types)",
        "return True",
        ("test_casts.py::test_row_numbers_are_what_they_are_taken_for",),
    ),
    Mutation(
        "9",
        "a type counts up as far as it likes",
        ROW_NUMBERS,
        'return bool(from_zero and is_exact_in(node.meta["val"].dtype, 0, longest(shape_of_node(node)[0])))',
        "return bool(from_zero)",
        ("test_casts.py::test_what_counts_up_is_held_by_its_type",),
    ),
    Mutation(
        "9",
        "sums of small integers become long",
        ROW_NUMBERS,
        'return writer.call(aten.sum.dim_IntList, apart, [1], dtype=node.meta["val"].dtype)',
        "return writer.call(aten.sum.dim_IntList, apart, [1])",
        ("test_casts.py::test_sums_into_rows_have_the_type_of_the_rows",),
    ),
    Mutation(
        "9",
        "any type holds counts of rows",
        EXPERTS,
        "    if isinstance(most, int):\n        return is_exact_in(dtype, 0, most)\n",
        "    if isinstance(most, int):\n        return True\n",
        ("test_casts.py::test_experts_whose_counts_are_cast",),
    ),
    Mutation(
        "9",
        "groups are not negative",
        EXPERTS,
        "    if orders.values.of(keys).low < 0:\n",
        "    if False:\n",
        ("test_experts.py::test_what_depends_on_the_order_runs_whole",),
    ),
    Mutation(
        "9",
        "a histogram counts nobody beyond its last expert",
        EXPERTS,
        "none_beyond = high == count - 1 or orders.values.of(numbers).high < count",
        "none_beyond = True",
        ("test_experts.py::test_rows_of_no_expert_that_the_last_bin_counts",),
    ),
    Mutation(
        "9",
        "what is counted is what is sorted by",
        EXPERTS,
        "if counted is None or _same_numbers(orders, counted) is not _same_numbers(orders, keys):",
        "if counted is None:",
        ("test_casts.py::test_experts_whose_counts_are_cast",),
    ),
    Mutation(
        "9",
        "copies keep numbers in any type",
        "passes/ops/ranges/casts.py",
        "    return is_whole(source, values) and is_exact_in(dtype, known.low, known.high)\n",
        "    return True\n",
        ("test_casts.py::test_experts_whose_counts_are_cast",),
    ),
    Mutation(
        "9",
        "a mask of rows is true behind two casts where it is behind one",
        "passes/rewrite/moe/masked_scatter.py",
        "    if mask.target is aten._to_copy.default:  # the one",
        "    while mask.target is aten._to_copy.default:  # the one",
        (ROW,),
    ),
    Mutation(
        "9",
        "the end of a group is a number of the groups' own type",
        "streamfx/kernels/grouped_mm.py",
        "torch.sort(group.to(torch.float64 if group.is_floating_point() else torch.int64), stable=True)",
        "torch.sort(group, stable=True)",
        ("test_experts.py::test_the_last_number_of_a_type",),
    ),
    Mutation(
        "9",
        "a look-up along rows takes negative numbers",
        ROW_NUMBERS,
        "        if not is_never_negative(index):\n",
        "        if False:\n",
        ("test_canonical.py::test_rows_that_are_gathered_are_not_counted_from_the_end",),
    ),
)
ROWS = (*LINEAR, *CASTS)
