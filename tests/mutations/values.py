"""What is known of values: arguments, types, and numbers that are no ordinary scores."""

from __future__ import annotations

from tests.mutations.row import Mutation

MISLEADS = "test_masks_that_mislead.py::test_arithmetic_that_misleads"
HIDDEN = "test_masks_that_mislead.py::test_rows_whose_visible_keys_are_all_hidden"
POSITIONS, TRANSFER = "passes/analysis/affine.py", "passes/ops/ranges/transfer.py"
MASKS, RANGES = "passes/analysis/mask_facts.py", "streamfx/ir/ranges.py"
INTERVALS, ARITHMETIC = "passes/analysis/mask_eval.py", "passes/ops/ranges/arithmetic.py"

KEYS = (
    Mutation(
        "keys",
        "what is made of positions goes by key",
        "passes/analysis/key_spans.py",
        "    return keys.isdisjoint(mixed)",
        "    return True",
        ("test_over_keys.py::test_all_keys_are_seen_where_an_operator_looks_at_others",),
    ),
    Mutation(
        "keys",
        "what follows on a softmax of positions is made for the keys that are asked for",
        "passes/analysis/key_spans.py",
        "node in axes.static and others.isdisjoint(producers) and _is_per_key",
        "node in axes.static and _is_per_key",
        ("test_over_keys.py::test_all_keys_are_seen_where_an_operator_looks_at_others",),
    ),
)
ARGUMENTS = (
    Mutation(
        "1",
        "alpha of a difference of positions is one",
        POSITIONS,
        "aten.sub.Tensor: lambda alpha: (1, -alpha)",
        "aten.sub.Tensor: lambda alpha: (1, -1)",
        (MISLEADS,),
    ),
    Mutation(
        "1",
        "the step of positions is one",
        POSITIONS,
        "None if start is None or step is None else _affine(step, start, 0)",
        "None if start is None or step is None else _affine(1, start, 0)",
        (MISLEADS,),
    ),
    Mutation(
        "1",
        "an argument that a transfer function does not name is covered",
        TRANSFER,
        "elif argument.name not in WITHOUT_MEANING and not _is_same(value, argument.default_value):",
        "elif False:",
        ("test_values.py::test_a_call_with_an_argument_that_no_row_names_is_not_covered",),
    ),
    Mutation(
        "1",
        "alpha of a sum of ranges is one",
        ARITHMETIC,
        "    if alpha == ONE:\n        return plus(a, b)\n",
        "    return plus(a, b)\n",
        ("test_values.py::test_transfer_functions_hold",),
    ),
    Mutation(
        "1",
        "a number beside half types is rounded to them first",
        TRANSFER,
        "return hull(held, in_type(known, torch.float32)) if is_number and dtype in HALF_TYPES else held",
        "return held",
        ("test_values.py::test_what_was_found_is_within_its_range",),
    ),
)
TYPES = (
    Mutation(
        "2",
        "types of whole numbers hold all of them",
        RANGES,
        "    return limits.low <= low and high <= limits.high",
        "    return True",
        ("test_values.py::test_whole_numbers_that_a_type_holds",),
    ),
    Mutation(
        "2",
        "types of fractions hold all whole numbers",
        RANGES,
        "        return -whole <= low and high <= whole and max(abs(low), abs(high)) <= torch.finfo(dtype).max",
        "        return True",
        ("test_values.py::test_whole_numbers_that_a_type_holds",),
    ),
    Mutation(
        "2",
        "what a type of whole numbers does not hold is cut, not wrapped",
        RANGES,
        "    if known.nan or known.low < limits.low or known.high > limits.high:",
        "    if known.nan:",
        ("test_values.py::test_what_a_type_makes_of_a_number",),
    ),
    Mutation(
        "2",
        "a difference of positions is held by any type",
        INTERVALS,
        'return everywhere(slope) if self.is_held(slope, node.meta["val"].dtype) else None',
        "return everywhere(slope)",
        (MISLEADS,),
    ),
    Mutation(
        "2",
        "positions are affine whatever their type makes of them",
        POSITIONS,
        'if found is None or not self.is_held(found, node, node.meta["val"].dtype):',
        "if found is None:",
        (MISLEADS,),
    ),
    Mutation(
        "2",
        "a slope is compared as it is in any type",
        INTERVALS,
        "if number is None or dtype is None or not self.is_held(slope, dtype):",
        "if number is None or dtype is None:",
        (MISLEADS,),
    ),
)
NUMBERS = (
    Mutation(
        "3",
        "a quotient by what may be zero is bounded",
        ARITHMETIC,
        "return Range(0, 0, True) if a.is_zero else ANYTHING",
        "return Range(-1e6, 1e6)",
        ("test_values.py::test_transfer_functions_hold",),
    ),
    Mutation(
        "3",
        "what the caller gives is an ordinary number",
        "passes/ops/ranges/analysis.py",
        "return activation(dtype) if node in self._trained else everything(dtype)",
        "return activation(dtype)",
        (HIDDEN,),
    ),
    Mutation(
        "3",
        "each row sees itself",
        MASKS,
        "sees_itself = score(scores.at(0)).low >= least and self._has_own_keys(node)",
        "sees_itself = True",
        (HIDDEN,),
    ),
    Mutation(
        "3",
        "each row has a key of its own",
        MASKS,
        "score(scores.at(0)).low >= least and self._has_own_keys(node)",
        "score(scores.at(0)).low >= least",
        ("test_masks_that_mislead.py::test_fewer_keys_than_rows",),
    ),
    Mutation(
        "3",
        "products of any numbers are ordinary",
        RANGES,
        "return self.magnitude <= (TAME if self.assumed else ACTIVATION)",
        "return True",
        ("test_values.py::test_what_weights_are_multiplied_by_adds_up",),
    ),
    Mutation(
        "3",
        "ordinary numbers may be multiplied without end",
        RANGES,
        "return larger if larger <= LARGER else 0",
        "return larger",
        ("test_values.py::test_what_weights_are_multiplied_by_adds_up",),
    ),
    Mutation(
        "3",
        "scores of fused attention are nothing beside its mask",
        MASKS,
        "products = scores_of(node, self.values) if node.target in FUSED else constant(0)",
        "products = constant(0)",
        ("test_masks_that_mislead.py::test_a_fused_scale_makes_scores_large",),
    ),
    Mutation(
        "3",
        "finite numbers hide beside scores of any size",
        "passes/analysis/fused_scores.py",
        "return scores_of(node, values).magnitude <= (ACTIVATION_HALF if half else TAME)",
        "return True",
        ("test_masks_that_mislead.py::test_a_fused_scale_makes_scores_large",),
    ),
    Mutation(
        "3",
        "a bias that wants a gradient is an activation",
        "streamfx/frontend/mask_buffers.py",
        "    return everywhere(everything(tensor.dtype)) if tensor.requires_grad else None\n",
        "    return None\n",
        ("test_masks_that_mislead.py::test_a_bias_that_the_caller_trains",),
    ),
    Mutation(
        "3",
        "all tables of a model hold ordinary numbers",
        "streamfx/frontend/mask_buffers.py",
        "    if least.item() >= -ACTIVATION and most.item() <= ACTIVATION:\n",
        "    if True:\n",
        ("test_masks_that_mislead.py::test_rows_whose_visible_keys_are_all_hidden",),
    ),
    Mutation(
        "3",
        "a sum over keys is narrowed to where any operand is zero",
        "passes/analysis/key_spans.py",
        "if len(axes.sequence_dims(axes.shapes[operand])) == 2 and is_linear(node, [operand])",
        "if len(axes.sequence_dims(axes.shapes[operand])) == 2",
        ("test_masks_that_mislead.py::test_a_zero_that_is_counted",),
    ),
)
ROWS = (*KEYS, *ARGUMENTS, *TYPES, *NUMBERS)
