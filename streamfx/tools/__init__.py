"""Commands and reports for users: `explain`, `verify`, `profile`, the planner and the command line.

The tools know the whole compiler and run it on fake or real tensors. They may import every other package; no pass, kernel or
runtime module may import them.
"""
