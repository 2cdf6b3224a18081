"""Build the program that replaces the joint graph: host programs, loops, loop bodies and buffers.

This package reads all facts about the joint graph and the plan of `passes/partition`. It writes new graphs and
calls into `runtime/`; it may import every other package of passes, and none of them imports it.
"""
