"""Rewrites of collectives: gathers and reductions of weights leave the graph, other reductions become one operator.

They know functional collectives, their waits, and the axes of reduced values. They may edit the joint graph and store the
removed operators in `Facts.collectives`; lowering reinserts these.
"""
