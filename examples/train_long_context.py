"""Trains a decoder on long sequences of real text in three ways, each in a process of its own, and prints one table.

    python examples/train_long_context.py                        # a small Qwen3, built in
    python examples/train_long_context.py --model smollm2        # the real SmolLM2-135M
    python examples/train_long_context.py --model path/to/model  # a Hugging Face folder

`streamfx.compare` runs the ways: eager, with gradient checkpointing, and through the backend.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from typing import Any

import torch
from workload import load_model, token_batch

import streamfx

INTERRUPTED = 130  # what shells say of a program that Ctrl-C ended


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train a decoder on long sequences: eager, checkpointing, streambp.")
    parser.add_argument("--model", default="small", help="'small' (built in), 'smollm2', or a Hugging Face folder")
    parser.add_argument("--length", type=int, help="tokens of the sequence (default: 8192, on a GPU 32768)")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: 3, on a GPU 10)")
    parser.add_argument("--chunk-size", type=int, help="rows per chunk of streambp (default: chosen for you)")
    parser.add_argument("--quick", action="store_true", help="the short form: 4096 tokens, 2 steps, a smaller model")
    parser.add_argument("--json", action="store_true", help="print the table as JSON; progress goes to stderr")
    return parser


def with_defaults(options: argparse.Namespace) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    if options.length is None:
        options.length = 4096 if options.quick else 32768 if on_gpu else 8192
    if options.steps is None:
        options.steps = 2 if options.quick else 10 if on_gpu else 3
    for name in ("length", "steps", "chunk_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise SystemExit(f"--{name.replace('_', '-')} must be 1 or more, not {value}")
    return options


def built(name: str, device: str) -> Any:
    """The model to train; each process calls this."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return load_model(name).to(device).train()


def main() -> None:
    options = with_defaults(arguments().parse_args())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = "tiny" if options.quick and options.model == "small" else options.model
    ids = token_batch(model, options.length).to(device)
    chosen = {} if options.chunk_size is None else {"chunk_size": options.chunk_size}
    optimizer = partial(torch.optim.AdamW, lr=3e-4, fused=True)
    try:
        found = streamfx.compare(
            partial(built, model, device), optimizer=optimizer, steps=options.steps, options=chosen, input_ids=ids, labels=ids
        )
    except streamfx.NotComparableError as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    if options.json:
        print(json.dumps({"model": options.model, "length": options.length, **found.summary()}))
        return
    print(f"{model}: {options.steps} steps on {options.length:,} tokens\n\n{found}")
    sys.exit(not found.ok)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
