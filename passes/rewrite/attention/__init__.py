"""Rewrites of attention: fused, unfused and packaged spellings become `streamfx::attention`, or products and a softmax.

They know softmax, scores, masks, attention sinks, heads and key positions. They may import the rules, value ranges and
kernels of attention, and the rewrites in `views`, but no other package of rewrites.
"""
