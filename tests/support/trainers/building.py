"""The trainers of transformers and TRL, each on its kind of data. `build(name, folder)` makes one, always the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.trainers import tiny
from tests.support.trainers.running import common


def build(name: str, folder: Path, model: Any = None, data: Any = None, peft: Any = None, **arguments: Any) -> Any:
    made = {"args": arguments, "model": model, "data": data, "peft": peft}
    return BUILDERS[name](folder, **made)


def transformers_trainer(folder: Path, args: dict[str, Any], model: Any, data: Any, peft: Any, **more: Any) -> Any:
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    words = tiny.tokenizer()
    rows = (data or tiny.texts()).map(lambda row: words(row["text"]), remove_columns=["text"])
    extra = {name: args.pop(name) for name in ("compute_metrics", "preprocess_logits_for_metrics") if name in args}
    return Trainer(
        model=model or tiny.causal_model(),
        args=TrainingArguments(**common(folder, **args)),
        train_dataset=rows,
        eval_dataset=rows.select(range(4)),
        data_collator=DataCollatorForLanguageModeling(words, mlm=False),
        **extra,
    )


def sft(folder: Path, args: dict[str, Any], model: Any, data: Any, peft: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(**common(folder, **args))
    return SFTTrainer(model or tiny.causal_model(), arguments, train_dataset=data or tiny.texts(), **_rest(peft))


def dpo(folder: Path, args: dict[str, Any], model: Any, data: Any, peft: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    reference: dict[str, Any] = {} if peft else {"ref_model": tiny.causal_model(1)}
    arguments = DPOConfig(**common(folder, **args))
    return DPOTrainer(
        model or tiny.causal_model(), args=arguments, train_dataset=data or tiny.pairs(), **reference, **_rest(peft)
    )


def kto(folder: Path, args: dict[str, Any], model: Any, data: Any, peft: Any) -> Any:
    from trl import KTOConfig, KTOTrainer

    arguments = KTOConfig(**common(folder, **args))
    return KTOTrainer(
        model or tiny.causal_model(), tiny.causal_model(1), arguments, train_dataset=data or tiny.liked(), **_rest(peft)
    )


def grpo(folder: Path, args: dict[str, Any], model: Any, data: Any, peft: Any) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(**common(folder, **{"num_generations": 2, "max_completion_length": 8, "beta": 0.04, **args}))
    return GRPOTrainer(_saved(folder, model), distinct_words, arguments, train_dataset=data or tiny.prompts(), **_rest(peft))


def rloo(folder: Path, args: dict[str, Any], model: Any, data: Any, peft: Any) -> Any:
    from trl import RLOOConfig, RLOOTrainer

    arguments = RLOOConfig(**common(folder, **{"num_generations": 2, "max_completion_length": 8, **args}))
    return RLOOTrainer(_saved(folder, model), distinct_words, arguments, train_dataset=data or tiny.prompts(), **_rest(peft))


def reward(folder: Path, args: dict[str, Any], model: Any, data: Any, peft: Any) -> Any:
    from trl import RewardConfig, RewardTrainer

    arguments = RewardConfig(**common(folder, **args))
    return RewardTrainer(model or tiny.reward_model(), arguments, train_dataset=data or tiny.pairs(), **_rest(peft))


def distinct_words(completions: list[str], **others: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def _saved(folder: Path, model: Any) -> Any:
    """A model with a folder of its own: trainers load the reference from there."""
    from transformers import AutoModelForCausalLM

    if model is not None:
        return model
    path = folder / "model"
    if not path.exists():
        made: Any = tiny.causal_model()
        made.save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path)


def _rest(peft: Any) -> dict[str, Any]:
    return {"processing_class": tiny.tokenizer(), **({"peft_config": peft} if peft is not None else {})}


BUILDERS: dict[str, Callable[..., Any]] = {
    "transformers": transformers_trainer,
    "sft": sft,
    "dpo": dpo,
    "kto": kto,
    "grpo": grpo,
    "rloo": rloo,
    "reward": reward,
}
