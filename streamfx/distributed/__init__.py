"""Decisions on which all ranks of a group must agree.

The package compares the collectives and chunks that ranks are about to run, and detects parameters that other libraries
partition. It knows facts and the order of collectives (`streamfx.ir`, `streamfx.passes.lowering`). It exchanges text with other
ranks. If they differ, it runs the passes with reductions between loops, or drops the program of a graph.
"""
