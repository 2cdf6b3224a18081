"""Recurrences: find loops over rows that tracing unrolled, and replace each by one operator that runs chunk by chunk.

This package rewrites the joint graph by facts about axes; truncation of their gradients (`adjoints`) is the one pass
that runs later. It knows rows, steps and carries, but not how a model's layers are cut into stages. It may import
`analysis`, `rewrite` and the layers below them.
"""
