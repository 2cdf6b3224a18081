"""The code that runs at each step: loops over chunks, their buffers, recurrences, offloading and replayed randomness.

It knows the program (`ir.program`), tensors and chunks; it knows nothing of the passes that built the program. This
package may import `kernels`, `dialect`, `ir`, `torch_private` and the modules below them in the layers of pyproject.toml, and
nothing above.
"""
