"""Launchers that create the trainer themselves have the losses of eager with the plugins of `examples/plugins`, to five digits.

The launchers are not among the requirements of the tests: `pip install` what you want to test. Each trains a small random decoder
for five steps on a CPU, in float32, in a process of its own.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
PLUGINS = ROOT / "examples" / "plugins"
OPTIONS = {"chunk_size": 32, "loss_chunk_size": 32}
STEPS = 5
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
MESSAGES = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"


def write_example(folder: Path) -> None:
    """Write a random model, its tokenizer, and two data sets: of answers, and of preferences."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    torch.manual_seed(0)
    characters = ["<pad>", "<s>", "</s>", *pre_tokenizers.ByteLevel.alphabet()]
    tokens = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(characters)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.add_special_tokens(characters[:3])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="</s>", chat_template=MESSAGES)
    config = LlamaConfig(vocab_size=512, pad_token_id=0, bos_token_id=1, eos_token_id=2, **SIZES)
    for saved in (tokenizer, AutoModelForCausalLM.from_config(config)):
        saved.save_pretrained(folder / "model")
    draw = random.Random(0)

    def words() -> str:
        return " ".join(f"word{draw.randrange(60)}" for _ in range(draw.randint(5, 25)))

    rows = [{"instruction": words(), "input": "", "output": words(), "rejected": words()} for _ in range(32)]
    columns = {"prompt": "instruction", "query": "input", "chosen": "output", "rejected": "rejected"}
    sets = {"answers": {"file_name": "data.json"}, "pairs": {"file_name": "data.json", "ranking": True, "columns": columns}}
    (folder / "data.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps(sets))


def run(command: list[Any], folder: Path, output: str) -> tuple[list[float], str]:
    """Run a training in a folder; return its losses, from the state that its trainer saved in `output`, and what it printed."""
    paths = os.pathsep.join([str(ROOT), str(PLUGINS), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": paths, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    quiet = {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1", "STREAMFX_OPTIONS": json.dumps(OPTIONS)}
    done = subprocess.run(list(map(str, command)), cwd=folder, env=os.environ | own | quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (state,) = (folder / output).rglob("trainer_state.json")
    return [row["loss"] for row in json.loads(state.read_text())["log_history"] if "loss" in row], done.stdout + done.stderr


def assert_same_losses(plain: list[Any], streamed: list[Any], folder: Path) -> None:
    """Run two commands, the second of which trains through streamfx; they write to "plain" and "streamed"."""
    wanted, _ = run(plain, folder, "plain")
    found, printed = run(streamed, folder, "streamed")
    assert len(wanted) == STEPS and found == pytest.approx(wanted, rel=1e-5)
    assert "every stage streams, 32 rows per chunk" in printed


LLAMAFACTORY: dict[str, Any] = {
    "answers": {"stage": "sft", "finetuning_type": "full", "dataset": "answers"},
    "answers, packed": {"stage": "sft", "finetuning_type": "full", "dataset": "answers", "packing": True, "neat_packing": True},
    "answers, lora": {"stage": "sft", "finetuning_type": "lora", "dataset": "answers"},
    "preferences": {"stage": "dpo", "finetuning_type": "full", "dataset": "pairs"},
    "preferences, lora": {"stage": "dpo", "finetuning_type": "lora", "dataset": "pairs"},
}


@pytest.mark.parametrize("name", LLAMAFACTORY)
def test_llamafactory(name: str, tmp_path: Path) -> None:
    pytest.importorskip("llamafactory")
    write_example(tmp_path)
    given: dict[str, Any] = {
        "model_name_or_path": "model",
        "do_train": True,
        "dataset_dir": ".",
        "template": "qwen",
        "use_cpu": True,
    }
    given |= {"cutoff_len": 256, "preprocessing_num_workers": 1, "report_to": "none", "save_strategy": "no", "logging_steps": 1}
    given |= {"per_device_train_batch_size": 4, "learning_rate": 1e-4, "max_steps": STEPS, **LLAMAFACTORY[name]}
    (tmp_path / "train.yaml").write_text(json.dumps(given))  # YAML reads JSON
    plain = ["llamafactory-cli", "train", "train.yaml", "output_dir=plain"]
    assert_same_losses(plain, [sys.executable, PLUGINS / "train_llamafactory.py", "train.yaml", "output_dir=streamed"], tmp_path)


AXOLOTL: dict[str, Mapping[str, Any]] = {
    "answers": {},
    "answers, checkpoints": {"gradient_checkpointing": True},
    "answers, packed": {"sample_packing": True, "sdp_attention": True},
}


@pytest.mark.parametrize("name", AXOLOTL)
def test_axolotl(name: str, tmp_path: Path) -> None:
    if shutil.which("axolotl", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("Axolotl is not installed")
    write_example(tmp_path)
    given: dict[str, Any] = {"base_model": "model", "datasets": [{"path": "data.json", "type": "alpaca", "ds_type": "json"}]}
    given |= {"dataset_prepared_path": "prepared", "sequence_len": 512, "bf16": False, "tf32": False, "optimizer": "adamw_torch"}
    given |= {"micro_batch_size": 4, "gradient_accumulation_steps": 1, "learning_rate": 1e-4, "lr_scheduler": "cosine"}
    given |= {"max_steps": STEPS, "save_steps": STEPS, "logging_steps": 1, "val_set_size": 0, **AXOLOTL[name]}
    streamed = {"plugins": ["streamfx_axolotl.StreamPlugin"], "streamfx": OPTIONS}
    for output, more in (("plain", {}), ("streamed", streamed)):  # YAML reads JSON
        (tmp_path / f"{output}.yaml").write_text(json.dumps({**given, **more, "output_dir": output}))
    assert_same_losses(["axolotl", "train", "plain.yaml"], ["axolotl", "train", "streamed.yaml"], tmp_path)


def test_ms_swift(tmp_path: Path) -> None:
    if shutil.which("swift", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("ms-swift is not installed")
    write_example(tmp_path)
    given: dict[str, Any] = {
        "model": "model",
        "model_type": "llama",
        "template": "chatml",
        "dataset": "data.json",
        "tuner_type": "full",
    }
    given |= {"torch_dtype": "float32", "attn_impl": "sdpa", "max_length": 512, "split_dataset_ratio": 0, "add_version": False}
    given |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "learning_rate": 1e-4, "logging_steps": 1}
    given |= {"max_steps": STEPS, "save_steps": STEPS, "use_hf": True, "report_to": "none"}
    command = ["swift", "sft", *(word for name, value in given.items() for word in (f"--{name}", value)), "--output_dir"]
    plugin = ["--external_plugins", PLUGINS / "streamfx_swift.py", "--callbacks", "streamfx"]
    assert_same_losses([*command, "plain"], [*command, "streamed", *plugin], tmp_path)
