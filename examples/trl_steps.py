"""What the examples with TRL share: a model, a tokenizer of bytes, and a callback that reports each step."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from side_by_side import Report
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from workload import small_config

QUICK = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 2000}


def small_model(options: argparse.Namespace, **changes: int) -> Any:
    """A Qwen3 with drawn weights: the 28 million parameters of the other examples, or next to none for `--quick`."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(small_config(**{**(QUICK if options.quick else {}), **changes}))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<eos>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*special, *alphabet])}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def training_arguments(method: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Arguments of all trainers; plain SGD, so that weights can be compared."""
    return {
        "output_dir": folder,
        "max_steps": options.steps,
        "learning_rate": 0.01,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": method == "checkpointing",
        "bf16": False,
        "use_cpu": not torch.cuda.is_available(),
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 0,
    }


class Reporting(TrainerCallback):
    """Measures each step of a trainer from its beginning to the optimizer's."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.report.start()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        if logs and "loss" in logs:
            self.report.step(float(logs.get("reward", logs["loss"])))
