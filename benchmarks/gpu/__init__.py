"""Benchmarks for one GPU: two commands that need torch, transformers, networkx and jinja2, and nothing installed of streamfx.

    python -m benchmarks.gpu kernels      at most 240 seconds: versions, products, attention, small models against float64
    python -m benchmarks.gpu steps        at most 420 seconds: steps of Qwen3-8B beside gradient checkpointing

The command (`command.py`) imports no torch. It starts a worker (`worker.py`), which runs the checks of `checks.py` in order, and
prints each figure as soon as it exists. `process.py` ends a worker, with all processes it started, if it hangs.
"""
