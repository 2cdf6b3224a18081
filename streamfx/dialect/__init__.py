"""The operators that streamfx adds to torch, under the names `torch.ops.streamfx.*`: one module per family of operators.

For each operator this package has its schema, its results on fake tensors, its FLOPs and its gradient formula. It knows
neither kernels nor chunks: `kernels` and `runtime` implement the operators, and the passes write and match them by the
names that these modules export. It may import `ir`, `torch_private`, `node_meta` and torch.
"""
