"""A trainer without and with `streamfx.enable`: losses, metrics and final weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from streamfx.integrations import EnabledModules, enable

OF_TIME = ("runtime", "per_second", "flos", "time", "num_tokens")  # in which two equal runs differ
CHUNK = 7


def common(folder: Path, **more: Any) -> dict[str, Any]:
    """Arguments of all trainers. SGD, because Adam's first steps are signs, which differ for 1e-8 and -1e-8."""
    own = {
        "output_dir": str(folder),
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "bf16": False,
        "seed": 5,
    }
    return {**own, **more}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def history(trainer: Any) -> list[dict[str, float]]:
    """Return the log without entries in which two equal runs differ."""
    return [
        {name: value for name, value in entry.items() if not any(part in name for part in OF_TIME)}
        for entry in trainer.state.log_history
    ]


@contextmanager
def enabled(trainer: Any, **options: Any) -> Iterator[EnabledModules]:
    torch._dynamo.reset()
    with enable(trainer, **{"chunk_size": CHUNK, "loss_chunk_size": CHUNK, **options}) as made:
        yield made


def assert_same_training(build: Callable[[], Any], tolerance: float = 1e-5, **options: Any) -> tuple[Any, EnabledModules]:
    """Train twice; histories and weights are the same up to `tolerance` (float32), and training did change the weights."""
    plain, streamed = build(), build()
    before = weights(streamed.model)
    torch.manual_seed(3)
    plain.train()
    torch.manual_seed(3)
    with enabled(streamed, **options) as done:
        streamed.train()
    assert all(calls.counts.compiled for name, calls in done.calls.items() if name.startswith("model")), str(done)
    assert_same_history(history(streamed), history(plain), tolerance)
    assert_same_weights(weights(streamed.model), weights(plain.model), tolerance)
    assert any(not torch.equal(before[name], value) for name, value in weights(plain.model).items()), "nothing was learned"
    return streamed, done


def assert_same_history(actual: list[dict[str, float]], wanted: list[dict[str, float]], tolerance: float) -> None:
    assert len(actual) == len(wanted)
    for ours, theirs in zip(actual, wanted, strict=True):
        assert ours.keys() == theirs.keys()
        wrong = {name: (ours[name], value) for name, value in theirs.items() if not close(ours[name], value, tolerance)}
        assert not wrong, wrong


def close(actual: Any, wanted: Any, tolerance: float) -> bool:
    if not isinstance(wanted, (int, float)):
        return bool(actual == wanted)
    return (actual != actual and wanted != wanted) or abs(actual - wanted) <= tolerance * max(1.0, abs(wanted))


def assert_same_weights(actual: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert list(actual) == list(wanted)
    for name, value in wanted.items():
        error = (actual[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-6)
        assert error <= tolerance, (name, float(error))
