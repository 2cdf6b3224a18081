"""Cut the analyzed joint graph into stages, and plan the loops, saved values and chunk size of each stage.

This package reads the axes, access roles and spans that `passes/analysis` found, and prices plans with `cost/`. It
may reorder the joint graph, and write the loss gradient's scaling into it, but it builds no loop: `passes/lowering`
does, and imports this package, never the reverse.
"""
