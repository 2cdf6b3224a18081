"""Steps of TRL's trainers: their `compute_loss` on a batch as their collators make it, and its gradient."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from benchmarks.workloads import Decoder

PROMPT = 4  # one token in so many belongs to the prompt


class TrlStep(Decoder):
    """DPO on a pair of sequences with a reference model, or GRPO on two answers (TRL's default is without one)."""

    @cached_property
    def module(self) -> Any:
        return self.trainer.model

    @cached_property
    def trainer(self) -> Any:
        arguments = {
            "output_dir": tempfile.mkdtemp(),
            "gradient_checkpointing": bool(self.way.checkpointing),
            "use_cpu": self.device == "cpu",
            "bf16": False,
            "report_to": "none",
            "per_device_train_batch_size": 2,
        }
        made = _dpo(self.model, arguments) if self.feed == "dpo" else _grpo(self.model, arguments)
        made.current_gradient_accumulation_steps = 1
        return made

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(3, self.model.config.vocab_size, (2, self.length), generator=draw).to(self.device)
        mask, prompt = torch.ones_like(ids), self.length // PROMPT
        if self.feed == "dpo":
            completion = mask.clone()
            completion[:, :prompt] = 0
            return {"input_ids": ids, "attention_mask": mask, "completion_mask": completion}
        return {
            "prompt_ids": ids[:, :prompt],
            "prompt_mask": mask[:, :prompt],
            "completion_ids": ids[:, prompt:],
            "completion_mask": mask[:, prompt:],
            "advantages": torch.tensor([1.0, -1.0], device=self.device),
            "num_items_in_batch": mask[:, prompt:].sum(),
        }

    def loss(self, **inputs: Tensor) -> Tensor:
        return self.trainer.compute_loss(self.trainer.model, inputs)  # type: ignore[no-any-return]

    def compiled(self, backend: str, options: Mapping[str, Any]) -> Callable[..., Tensor]:
        import streamfx

        assert backend == "streambp"
        streamfx.enable(self.trainer, **options)
        return self.loss


def _dpo(model: Any, arguments: dict[str, Any]) -> Any:
    import copy

    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    pairs = Dataset.from_list([{"prompt": "a", "chosen": " a", "rejected": " a a"}] * 2)
    return DPOTrainer(
        model, ref_model=copy.deepcopy(model), args=DPOConfig(**arguments), train_dataset=pairs, processing_class=_tokenizer()
    )


def _grpo(model: Any, arguments: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    return GRPOTrainer(
        model,
        lambda completions, **others: [0.0] * len(completions),
        args=GRPOConfig(**arguments, num_generations=2),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 2),
        processing_class=_tokenizer(),
    )


def _tokenizer() -> Any:
    """Trainers ask for one; batches are made of numbers here."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="a")
