"""Tables of facts per operator: how it maps axes (`rules/`), ranges of numbers (`ranges/`), linearity, aliasing and
other traits.

This package has facts about single operators, or about a value and its producers. It knows ATen, the operators of
streamfx and a few packages by name, but no passes and no `Facts`. It may import `cost`, `runtime`, `kernels`, `ir`
and the layers below them; it never changes a graph.
"""
