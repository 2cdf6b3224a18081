"""Facts about the joint graph: sequence axes, the rows that an operator reads, the keys that a query position sees.

Analyses add facts and leave the graph unchanged, except that a mask is dropped if the span of visible keys implies it.
They know axis rules, ranges and index arithmetic, but nothing of stages or loops. This
package may import `ops` and the layers below it, but not `rewrite`.
"""
