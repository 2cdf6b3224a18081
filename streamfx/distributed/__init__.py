"""Decisions that all ranks of a group must make alike.

It compares the collectives and chunks that ranks are about to run, and detects parameters that other libraries partition.
It knows facts and the order of collectives (`streamfx.ir`, `streamfx.passes.lowering`). It exchanges text with other ranks, and
changes a graph only by compiling it again with reductions between loops, or by dropping its program.
"""
