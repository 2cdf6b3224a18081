"""Rewrites of views, indices, constants and concatenations: data movement in the forms that operator rules read.

They know shapes, strides, constant indices and the bounds of slices. They may import no other package of rewrites;
attention, MoE and scan rewrites build on them.
"""
