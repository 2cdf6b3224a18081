"""Equations that do not hold for all that they are applied to: sinks, and operands taken for what they usually are."""

from __future__ import annotations

from tests.mutations.row import Mutation

COLUMN, FUSED = "passes/canonicalization/dropped_column.py", "passes/canonicalization/attention_with_sink.py"
SOFTMAX, GROUPED = "passes/canonicalization/softmax.py", "passes/canonicalization/grouped.py"
NO_OPS, PERMUTATIONS = "passes/canonicalization/no_ops.py", "passes/canonicalization/permutations.py"
ROW, OTHER_ROW = "test_canonical.py::test_row", "test_canonical_equations.py::test_row"
SAME, GROUPS = "test_attention_with_sink.py::test_it_is_the_same", "test_canonical_equations.py::test_groups_of_heads"
NO_KEY = "test_scores.py::test_a_sink_over_rows_that_see_no_key"
TWO_SHARES = "    return [writer.call(aten.slice.Tensor, shares, dim, i, i + 1) for i in range(2)]\n"
ONE_SHARE = (
    "    own = writer.call(aten.slice.Tensor, shares, dim, 0, 1)\n"
    "    return [own, writer.call(aten.neg.default, writer.call(aten.sub.Tensor, own, 1))]\n"
)

SINKS = (
    Mutation(
        "10",
        "a row that sees no key is softmax(scores) times nothing",
        COLUMN,
        "    kept = writer.call(aten.masked_fill.Scalar, kept, writer.call(aten.eq.Scalar, share, 0), 0)\n",
        "",
        (NO_KEY,),
    ),
    Mutation(
        "10",
        "the column's share is what the scores leave",
        COLUMN,
        TWO_SHARES,
        ONE_SHARE,
        ("test_scores.py::test_a_sink_over_rows_that_see_no_key",),
    ),
    Mutation(
        "10",
        "scores are not taken less the column",
        COLUMN,
        "    less = writer.call(aten.where.self, writer.call(aten.isinf.default, column), zero, column)\n",
        "    less = zero\n",
        ("test_scores.py::test_a_sink_as_low_as_what_is_hidden",),
    ),
    Mutation(
        "10",
        "another gradient of the softmax is taken for that of its scores",
        COLUMN,
        "    return fits and all(any(is_part(user, found, part) for part in parts) for user in node.users)",
        "    return all(any(is_part(user, found, part) for part in parts) for user in node.users)",
        (OTHER_ROW,),
    ),
    Mutation(
        "sinks",
        "the share of a sink is what the scores leave",
        FUSED,
        "self.rest = write(aten.sigmoid.default, write(aten.sub.Tensor, sink, lse))",
        "self.rest = write(aten.rsub.Scalar, write(aten.sigmoid.default, write(aten.sub.Tensor, lse, sink)), 1)",
        ("test_attention_with_sink.py::test_the_gradient_of_a_small_share_keeps_its_digits",),
    ),
    Mutation(
        "sinks",
        "a sink may be any number",
        FUSED,
        " or not fits(column) or not _is_ordinary(column.column):",
        " or not fits(column):",
        ("test_attention_with_sink.py::test_it_is_the_same",),
    ),
    Mutation(
        "sinks",
        "a query that is no number does not show",
        FUSED,
        "        share = write(aten.add.Tensor, share, nothing)",
        "        assert nothing",
        ("test_attention_with_sink.py::test_a_query_that_is_no_number_shows",),
    ),
    Mutation(
        "sinks",
        "the backward half is given the sum without the sink",
        FUSED,
        "self.total = write(aten.logaddexp.default, lse, sink)",
        "self.total = lse",
        (SAME,),
    ),
    Mutation(
        "sinks",
        "gradients may come before the result",
        FUSED,
        "return found if found.fits_a_kernel() and _is_in_order(found) else None",
        "return found if found.fits_a_kernel() else None",
        ("test_attention_with_sink.py::test_it_is_the_same",),
    ),
    Mutation(
        "sinks",
        "probabilities may have other uses beside the product with the values",
        "passes/canonicalization/spelled_attention.py",
        "            elif not is_turned(user, node) or not all(self._takes_turned(other, user) for other in user.users):\n"
        "                return False\n",
        "            else:\n                all(self._takes_turned(other, user) for other in user.users)\n",
        ("test_attention_with_sink.py::test_it_is_the_same",),
    ),
    Mutation(
        "sinks",
        "a product of one key is a product of all",
        "passes/canonicalization/spelled_attention.py",
        "fits = shape_of_node(node) == _joined(shape) and (",
        "fits = (",
        ("test_attention_with_sink.py::test_it_is_the_same",),
    ),
    Mutation(
        "sinks",
        "scores of no width fit a kernel",
        "passes/canonicalization/spelled_attention.py",
        " or self.values is None or not shape_of_node(self.values)[-1]:",
        " or self.values is None:",
        ("test_attention_with_sink.py::test_it_is_the_same",),
    ),
)
OPERANDS = (
    Mutation(
        "11",
        "whatever a gradient of a softmax is given is a softmax",
        SOFTMAX,
        "    if softmax.target is not aten._softmax.default or shape_of_node(softmax) != shape_of_node(gradient) or not rank:\n",
        "    if not rank:\n",
        (OTHER_ROW,),
    ),
    Mutation(
        "11",
        "a gradient is of the softmax along any dimension",
        SOFTMAX,
        'is_same = own["dim"] % rank == arguments["dim"] % rank and not',
        "is_same = not",
        (OTHER_ROW,),
    ),
    Mutation(
        "11",
        "what is subtracted is the largest along any dimension",
        SOFTMAX,
        'return bool(rank and arguments["keepdim"]) and [item % rank for item in dims] == [dim % rank]',
        'return bool(rank and arguments["keepdim"])',
        (OTHER_ROW,),
    ),
    Mutation(
        "11",
        "the largest score is subtracted once",
        SOFTMAX,
        "    if scale != 1 or not is_tensor(scores) or not is_tensor(largest) or not",
        "    if not is_tensor(scores) or not is_tensor(largest) or not",
        (OTHER_ROW,),
    ),
    Mutation(
        "11",
        "any five-dimensional view is one of groups of heads",
        GROUPED,
        "if node.target not in VIEWS or shape_of_node(node) != repeated or len(node.users) != 1:",
        "if node.target not in VIEWS or len(shape_of_node(node)) != 5 or len(node.users) != 1:",
        (GROUPS,),
    ),
    Mutation(
        "11",
        "a sum over repeats is made in any type",
        GROUPED,
        '    if total.meta["val"].dtype != node.meta["val"].dtype:\n        return None\n',
        "",
        (GROUPS,),
    ),
    Mutation(
        "11",
        "each second row is each row",
        NO_OPS,
        '_unless_it_changes_shape(node) if bound_arguments(node)["step"] == 1 else None',
        "_unless_it_changes_shape(node)",
        (ROW,),
    ),
    Mutation(
        "11",
        "padding by as much as it cuts is nothing",
        NO_OPS,
        "return None if operand is None or is_moved else",
        "return None if operand is None else",
        ("test_canonical.py::test_row",),
    ),
    Mutation(
        "11",
        "what is sorted begins with the least",
        PERMUTATIONS,
        '    if len(shape_of_node(keys)) != 1 or arguments["descending"]:\n',
        "    if len(shape_of_node(keys)) != 1:\n",
        ("test_experts.py::test_what_depends_on_the_order_runs_whole[descending]",),
    ),
    Mutation(
        "11",
        "a table of whole numbers holds numbers of rows",
        "streamfx/constants.py",
        "    return PLACES if least.item() >= 0 and most.item() <= MOST_COUNTED else None\n",
        "    return PLACES\n",
        ("test_experts.py::test_groups_from_a_table_that_changes",),
    ),
    Mutation(
        "11",
        "a sum into rows begins with nothing",
        "passes/canonicalization/row_numbers.py",
        "    if index is None or not adds or not is_zero(base):\n",
        "    if index is None or not adds:\n",
        ("test_casts.py::test_sums_into_rows_have_their_type_begin_with_nothing_and_add_once",),
    ),
    Mutation(
        "11",
        "what is added is added once",
        "passes/canonicalization/row_numbers.py",
        'adds = arguments.get("accumulate", arguments.get("alpha") == 1)',
        'adds = arguments.get("accumulate", True)',
        ("test_casts.py::test_sums_into_rows_have_their_type_begin_with_nothing_and_add_once",),
    ),
    Mutation(
        "11",
        "equal arguments are equal whatever the sign of their zero",
        "passes/canonicalization/driver.py",
        "sign = math.copysign(1.0, item) if isinstance(item, float) else None",
        "sign = None",
        ("test_canonical.py::test_row",),
    ),
    Mutation(
        "11",
        "a mean over labels is divided by all of them",
        "passes/canonicalization/losses.py",
        "counted, device = writer.call(aten.ne.Scalar, labels, ignored), labels",
        "counted, device = writer.call(aten.ne.Scalar, labels, ignored - 1), labels",
        (OTHER_ROW,),
    ),
)
ROWS = (*SINKS, *OPERANDS)
