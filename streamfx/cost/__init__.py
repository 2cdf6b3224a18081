"""Cost models: FLOPs, bytes moved, communication, and live bytes of a step, measured by running it on fake tensors.

They know operators, loops, and kernels, but no pass: the planner, the passes, and the reports call them. They may import
`runtime`, `kernels`, `ir`, and the modules below these; they change no graph that they are given.
"""
