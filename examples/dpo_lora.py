"""Direct preference optimization of adapters (LoRA) with TRL, on pairs of long texts.

    python examples/dpo_lora.py             # sequences of 2,048 tokens, a few minutes on two CPU cores
    python examples/dpo_lora.py --quick     # a tiny model, seconds

The preferred text is prose of Python's own documentation, the other one the same prose with its words shuffled.
"""

from __future__ import annotations

import argparse
import random

from side_by_side import Report, arguments, compare


def pairs(length: int, count: int) -> list[dict[str, str]]:
    from workload import standard_library_text

    text, prompt, draw = standard_library_text(), length // 4, random.Random(0)
    made = []
    for start in range(0, count * length, length):
        chosen = text[start + prompt : start + length - 1]
        words = chosen.split(" ")
        draw.shuffle(words)
        made.append({"prompt": text[start : start + prompt], "chosen": chosen, "rejected": " ".join(words)})
    return made


def work(method: str, options: argparse.Namespace, report: Report) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer
    from trl_steps import Reporting, byte_tokenizer, small_model, training_arguments

    import streamfx

    trainer = DPOTrainer(
        small_model(options),
        args=DPOConfig(
            **training_arguments(method, options, str(report.folder)), per_device_train_batch_size=1, max_length=options.length
        ),
        train_dataset=Dataset.from_list(pairs(options.length, options.steps)),
        processing_class=byte_tokenizer(),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        callbacks=[Reporting(report)],
    )
    if method == "streambp":
        streamfx.enable(trainer)  # the one line
    trainer.train()
    report.end(trainer.model)


if __name__ == "__main__":
    compare(work, arguments(__doc__ or "", length=2048, steps=3))
