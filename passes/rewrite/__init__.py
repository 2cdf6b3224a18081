"""Graph-to-graph rewrites: each file replaces the many spellings of one operation by the single form that later passes
read.

Rewrites know operators, shapes, constants and value ranges (`passes/ops`), and, for operators along the sequence, the
axes found so far. They may change nodes of an FX graph, but not its inputs, its outputs or, up to rounding, its values;
they import `passes/ops` and the layers below it, never `analysis`, `scan`, `partition` or `lowering`.
"""
