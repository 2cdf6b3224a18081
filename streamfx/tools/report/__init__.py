"""Reports: text, HTML, SVG, diagrams, and traces of the graphs that the backend compiled.

This package turns facts, programs and costs into plain figures and text. It knows the data of every pass (`streamfx.ir`,
`streamfx.cost`) and how to print each product. It changes no graph and runs no model; only `exports` and `paths` write files.
"""
