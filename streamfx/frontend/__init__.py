"""The `torch.compile` backend and its public registration functions.

This package receives Dynamo's and AOTAutograd's graphs, matches patterns that only Dynamo's graph shows, runs the
passes, and returns the forward and backward callables. It may import passes, runtime, reports and `lazy/`, but not
the tools that run it (`tools/inspect`, `tools/planner`, `tools/cli`).
"""
