"""Graph-to-graph rewrites: each replaces the variants of an operation by the one variant that later passes read.

Rewrites know operators, shapes, constants and value ranges (`passes/ops`), and, for operators along the sequence, the
axes found so far. They edit nodes of an FX graph and keep its inputs, its outputs and, up to rounding, its values
(`collectives` also replaces sharded inputs and reduced outputs); they import `passes/ops` and the layers below it, never
`analysis`, `scan`, `partition` or `lowering`.
"""
