"""Kernels that loop bodies call: fused attention for each device, grouped products, convolutions and in-place sums.

A kernel knows tensors, devices and masks; it knows nothing of graphs, stages or passes. This package may import
`dialect`, `ir`, `torch_private` and the modules below them in the layers of pyproject.toml, and nothing of `runtime` or of
the passes.
"""
