"""Reinforcement learning (GRPO) with TRL and a reward that is computed: how much of a completion is words of the language.

    python examples/grpo.py             # completions of 512 tokens, some minutes on two CPU cores
    python examples/grpo.py --quick     # a tiny model, seconds

Completions are sampled by the model's own `generate`, which runs as it always did; the step on them goes through the backend.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from side_by_side import Report, arguments, compare


def prompts(count: int) -> list[dict[str, str]]:
    from workload import standard_library_text

    sentences = re.findall(r"[A-Z][^.\n]{40,80}\.", standard_library_text())
    return [{"prompt": sentence} for sentence in sentences[:count]]


def share_of_words(completions: list[str], **others: Any) -> list[float]:
    """The share of a completion's characters that are in words which the documentation of Python uses."""
    from workload import standard_library_text

    known = set(re.findall(r"[a-z]{2,}", standard_library_text()))
    found = [sum(len(word) for word in re.findall(r"[a-z]{2,}", text) if word in known) for text in completions]
    return [length / max(1, len(text)) for length, text in zip(found, completions, strict=True)]


def work(method: str, options: argparse.Namespace, report: Report) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl_steps import Reporting, byte_tokenizer, small_model, training_arguments

    import streamfx

    trainer = GRPOTrainer(
        small_model(options),
        share_of_words,
        args=GRPOConfig(
            **training_arguments(method, options, str(report.folder)),
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=options.length,
            generation_kwargs={"min_new_tokens": options.length},
        ),
        train_dataset=Dataset.from_list(prompts(8)),
        processing_class=byte_tokenizer(),
        callbacks=[Reporting(report)],
    )
    if method == "streambp":
        streamfx.enable(trainer)  # the one line
    trainer.train()
    report.end(trainer.model)


if __name__ == "__main__":
    compare(work, arguments(__doc__ or "", length=512, steps=3), measure="reward")
