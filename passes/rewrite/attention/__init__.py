"""Rewrites of attention: every fused, unfused or packaged spelling becomes `streamfx::attention`, products and a softmax,
or their slices.

They know softmax, scores, masks, attention sinks, heads and key positions. They may import the rules, value ranges and
kernels of attention, and the rewrites in `views`, but no other room of rewrites.
"""
