"""A tiny model, a tokenizer of words, and a few sentences, with no download."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WORDS = [f"w{number}" for number in range(56)]
SPECIAL = ["<pad>", "<bos>", "<eos>", "<user>", "<assistant>", "<end>", "<system>", "<unk>"]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<assistant> {% generation %}{{ message['content'] }} <eos> {% endgeneration %}"
    "{% else %}<user> {{ message['content'] }} <end> {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tokenizer() -> Any:
    """One token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *WORDS])}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    made = PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **names)
    made.chat_template = TEMPLATE
    return made


def config(**more: Any) -> Any:
    from transformers import LlamaConfig

    own = {
        "vocab_size": len(SPECIAL) + len(WORDS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaConfig(**{**own, **more})


def causal_model(seed: int = 0, **more: Any) -> nn.Module:
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    return louder(LlamaForCausalLM(config(**more)))


def reward_model() -> nn.Module:
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(0)
    return louder(LlamaForSequenceClassification(config(num_labels=1)))


def louder(model: nn.Module) -> nn.Module:
    """The usual 0.02 leaves attention almost uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def sentence(words: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[int(i)] for i in torch.randint(0, len(WORDS), (words,), generator=generator))


def texts() -> Any:
    return eight_rows(lambda i: {"text": sentence(24, i)})


def prompts() -> Any:
    return eight_rows(lambda i: {"prompt": sentence(6, i)})


def prompts_and_completions() -> Any:
    return eight_rows(completed)


def completed(i: int) -> dict[str, str]:
    return {"prompt": sentence(6, i), "completion": " " + sentence(16, 100 + i)}


def liked() -> Any:
    return eight_rows(lambda i: {**completed(i), "label": i % 2 == 0})


def pairs() -> Any:
    return eight_rows(
        lambda i: {"prompt": sentence(6, i), "chosen": " " + sentence(16, 100 + i), "rejected": " " + sentence(16, 200 + i)}
    )


def conversations() -> Any:
    roles = ("user", "assistant") * 2
    return eight_rows(
        lambda i: {"messages": [{"role": role, "content": sentence(10, 10 * i + k)} for k, role in enumerate(roles)]}
    )


def eight_rows(row: Callable[[int], dict[str, Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list([row(i) for i in range(8)])
