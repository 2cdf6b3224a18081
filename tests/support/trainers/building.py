"""The trainers of transformers and TRL, each on its kind of data. `build(name, folder)` makes one, always the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.trainers import tiny
from tests.support.trainers.running import common

SAMPLED = {"num_generations": 2, "max_completion_length": 8}
TRL: dict[str, tuple[str, Callable[[], Any], dict[str, Any]]] = {  # prefix, data, arguments
    "sft": ("SFT", tiny.texts, {}),
    "dpo": ("DPO", tiny.pairs, {}),
    "kto": ("KTO", tiny.liked, {}),
    "grpo": ("GRPO", tiny.prompts, {**SAMPLED, "beta": 0.04}),
    "rloo": ("RLOO", tiny.prompts, SAMPLED),
    "reward": ("Reward", tiny.pairs, {}),
}


def build(name: str, folder: Path, model: Any = None, data: Any = None, peft: Any = None, **arguments: Any) -> Any:
    if name == "transformers":
        return transformers_trainer(folder, model, data, arguments)
    import trl

    prefix, usual, own = TRL[name]
    more: dict[str, Any] = {"peft_config": peft} if peft is not None else {}
    if name in ("grpo", "rloo"):
        model, more["reward_funcs"] = model or _saved(folder), distinct_words
    elif name == "kto" or (name == "dpo" and not peft):
        more["ref_model"] = tiny.causal_model(1)
    return getattr(trl, f"{prefix}Trainer")(
        model=model or (tiny.reward_model() if name == "reward" else tiny.causal_model()),
        args=getattr(trl, f"{prefix}Config")(**common(folder, **{**own, **arguments})),
        train_dataset=data or usual(),
        processing_class=tiny.tokenizer(),
        **more,
    )


def transformers_trainer(folder: Path, model: Any, data: Any, args: dict[str, Any]) -> Any:
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


def distinct_words(completions: list[str], **others: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def _saved(folder: Path) -> Any:
    """A model from a new folder, from which trainers load the reference."""
    from transformers import AutoModelForCausalLM

    path = folder / "model"
    if not path.exists():
        made: Any = tiny.causal_model()
        made.save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path)
