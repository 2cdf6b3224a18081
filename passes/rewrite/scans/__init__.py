"""Rewrites of scans: operators with a state become recurrences over chunks, and convolution gradients are split.

They know the declared schema of each scan operator, its backward, and which saved results the backward reads. They may
replace a call only together with all of its backwards, by operators of `runtime`.
"""
