"""A whole run of a trainer from a cold start: TRL's `SFTTrainer` on sequences of changing lengths.

python -m benchmarks trainer_run --json FILE
python -m benchmarks.suites.trainer_run eager 20    # one run, in this process
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.settings import Rows, Settings

SIZES = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 8_000}
LENGTHS = 200, 900  # tokens of a sequence, at random
WAYS = "eager", "streambp"
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}  # a thread that waits takes no processor time: other programs share the cores


def trainer_run(settings: Settings) -> Rows:
    """TRL's `SFTTrainer` on one sequence of 200 to 900 tokens per step, without packing: a Llama of 4 layers of width 256. Each
    run has a process of its own with an empty cache, and the ways take turns. Seconds of `train`, and processor seconds with
    those of other processes that it starts, after the imports; `loss` is the mean over the steps.
    """
    steps, rounds = (2, 1) if settings.quick else (20, 3)
    rows: Rows = []
    for number in range(settings.rounds or rounds):
        for way in WAYS:
            settings.tell(f"{way}, {number + 1}")
            rows.append({"steps": steps, "way": way, **_in_new_process(way, steps)})
    return rows


def _in_new_process(way: str, steps: int) -> dict[str, Any]:
    """The figures of one run, which a new process prints in its last line."""
    with tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-m", "benchmarks.suites.trainer_run", way, str(steps), folder]
        environment = {**os.environ, **PASSIVE, "TORCHINDUCTOR_CACHE_DIR": folder}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(way: str, steps: int, folder: str) -> dict[str, Any]:
    """Train in this process; return the figures."""
    trainer = _trainer(steps, folder)
    start, start_times = time.perf_counter(), os.times()
    if way == "streambp":
        import streamfx

        streamfx.enable(trainer)
    loss = trainer.train().training_loss
    processor_seconds = sum(os.times()[:4]) - sum(start_times[:4])
    return {"seconds": round(time.perf_counter() - start, 1), "processor": round(processor_seconds, 1), "loss": round(loss, 4)}


def _trainer(steps: int, folder: str) -> Any:
    """The trainer, always with the same weights and data."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    torch.manual_seed(0)
    draw = random.Random(0)
    rows = [[draw.randrange(2, SIZES["vocab_size"]) for _ in range(draw.randint(*LENGTHS))] for _ in range(steps)]
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}))
    arguments: dict[str, Any] = {"max_steps": steps, "per_device_train_batch_size": 1, "gradient_checkpointing": False}
    arguments |= {"bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": steps}
    return SFTTrainer(
        AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)),
        SFTConfig(folder, **arguments),
        train_dataset=Dataset.from_list([{"input_ids": row, "labels": row} for row in rows]),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
    )


if __name__ == "__main__":
    way, steps, *folder = sys.argv[1:]
    print(json.dumps(run(way, int(steps), *(folder or [tempfile.mkdtemp()]))))
