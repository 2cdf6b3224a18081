"""What is proven of the numbers in a graph: one lattice (`streamfx/ir/ranges.py`) and one table of transfer functions.

transfer.py     how a row of the table is written, and how an operator is looked up in it
arithmetic.py   sums, products, quotients, comparisons, logic, choices
functions.py    functions of one number: exp, log, tanh ...
moves.py        views, look-ups, joins, fillers: numbers that stay what they are
reductions.py   sums, extremes, norms, softmaxes
products.py     products of matrices, attention
analysis.py     the whole graph
"""

from streamfx.passes.ops.ranges import arithmetic as _arithmetic  # noqa: F401  (each fills its part of the table)
from streamfx.passes.ops.ranges import products as _products  # noqa: F401
from streamfx.passes.ops.ranges import reductions as _reductions  # noqa: F401
from streamfx.passes.ops.ranges import unary as _functions  # noqa: F401
from streamfx.passes.ops.ranges import views as _moves  # noqa: F401
from streamfx.passes.ops.ranges.analysis import ValueRanges
from streamfx.passes.ops.ranges.transfer import TRANSFERS, Reader, applied

__all__ = ["TRANSFERS", "Reader", "ValueRanges", "applied"]
