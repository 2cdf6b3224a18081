"""Distillation: a student learns the distribution of a larger teacher, whose logits are computed in the same step.

    python examples/distillation.py             # sequences of 4,096 tokens, a few minutes on two CPU cores
    python examples/distillation.py --quick     # a tiny model, seconds

Student and teacher logits are two tensors of tokens times vocabulary. In the compiled step neither of them ever exists: both
heads run chunk by chunk, with the divergence between them.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from side_by_side import Report, arguments, compare, train
from torch import Tensor


def work(method: str, options: argparse.Namespace, report: Report) -> None:
    from trl_steps import byte_tokenizer, small_model
    from workload import standard_library_text

    student, teacher = small_model(options).train(), small_model(options, num_hidden_layers=6).eval().requires_grad_(False)
    tokens = byte_tokenizer()(standard_library_text()[: options.length * options.steps])["input_ids"]
    batches = torch.tensor(tokens).reshape(options.steps, 1, options.length)
    if method == "checkpointing":
        student.gradient_checkpointing_enable()

    def step(ids: Tensor) -> Tensor:
        """The divergence from the teacher at a temperature of two, beside the labels' cross entropy."""
        logits = student(input_ids=ids, use_cache=False).logits[:, :-1]
        with torch.no_grad():
            target = (teacher(input_ids=ids, use_cache=False).logits[:, :-1] / 2).log_softmax(-1)
        divergence = F.kl_div((logits / 2).log_softmax(-1), target, log_target=True, reduction="none").sum(-1).mean()
        return 4 * divergence + F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    run = torch.compile(step, backend="streambp") if method == "streambp" else step  # the one line
    train(student, run, batches, report)


if __name__ == "__main__":
    compare(work, arguments(__doc__ or "", length=4096, steps=3))
