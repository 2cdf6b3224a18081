"""The intermediate representation that all passes share: data classes for facts, plans, programs, and signatures.

It knows fx graphs, axes, sizes, and value ranges, but not how a pass derives them. It may import `torch_private`, `log`,
`errors`, `node_meta`, and the other modules below it; it imports no pass, no kernel, and no runtime code.
"""
