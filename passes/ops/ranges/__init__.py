"""Ranges of the numbers in a graph: one lattice (`streamfx/ir/ranges.py`) and one table of transfer functions.

A `Range` [low, high] bounds all elements of a value. Passes use it to prove, for example, that a mask hides a key.

transfer.py     registration and lookup of transfer functions
arithmetic.py   sums, products, quotients, comparisons, logic, selections
unary.py        functions of one number: exp, log, tanh ...
views.py        views, indexing, concatenation, constant fills: operators that move numbers or write constants
reductions.py   sums, extrema, norms, softmax
products.py     matrix products, attention
patterns.py     relations between two values that their ranges cannot express
casts.py        type conversions that keep numbers exact
analysis.py     the ranges of all values of a graph

The functions map ranges of operands to ranges of results. They do not depend on axes or loops, and may import `ir` and
traits of operators.
"""

from streamfx.passes.ops.ranges import arithmetic as _arithmetic  # noqa: F401  (each module fills its part of the table)
from streamfx.passes.ops.ranges import products as _products  # noqa: F401
from streamfx.passes.ops.ranges import reductions as _reductions  # noqa: F401
from streamfx.passes.ops.ranges import unary as _functions  # noqa: F401
from streamfx.passes.ops.ranges import views as _moves  # noqa: F401
from streamfx.passes.ops.ranges.analysis import ValueRanges
from streamfx.passes.ops.ranges.transfer import TRANSFERS, Reader, evaluate_transfer

__all__ = ["TRANSFERS", "Reader", "ValueRanges", "evaluate_transfer"]
