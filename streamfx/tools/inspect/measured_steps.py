"""Training steps of one *way* (eager, gradient checkpointing, streambp), measured in a process that does nothing else.

`streamfx.compare` starts one such process for each way. The process reads its job from a file, and writes an event for each step,
as a line of JSON, to a pipe.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from streamfx.errors import StreamFXError, describe_error
from streamfx.runtime import background_bodies
from streamfx.tools.inspect.eager import checkpointed
from streamfx.tools.inspect.layers import layers_of
from streamfx.tools.inspect.peak_memory import PeakMemory
from streamfx.tools.inspect.side_effect_guard import device_of
from streamfx.tools.inspect.torch_settings import TorchSettings
from streamfx.tools.inspect.verify import (
    TOLERANCES,
    default_loss,
    generator_states,
    gradient_sources,
    has_drawn,
    lowest_precision,
    relative_difference,
)

EAGER, CHECKPOINTING, STREAMBP = WAYS = ("eager", "gradient checkpointing", "streambp")
JOB, GRADIENTS = "job.pt", "gradients_{}.pt"  # by the number of the step
OUT_OF_MEMORY = "out of memory"
IMPORTED = "__streamfx_main__"  # the name under which the user's script is imported, so that it does not run as `__main__`
NO_LAYERS = "the model has no gradient_checkpointing_enable() and no list of layers"
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
is_measuring = False  # whether this is a process of `streamfx.compare`


@dataclass(frozen=True)
class Job:
    """The step to measure. `build` returns the model, its arguments, and its keyword arguments."""

    build: Callable[[], Call]
    loss: Callable[[Any], Tensor] | None
    optimizer: Callable[[Any], torch.optim.Optimizer] | None
    options: dict[str, Any]
    steps: int
    settings: TorchSettings


def serve(folder: str, way: str, descriptor: int, main_file: str, main_package: str | None) -> None:
    """Run the job of a folder in one way, and write its events to a pipe.

    `main_file` is the user's script, if the job refers to classes or functions of it, and `main_package` its package, for
    `python -m package.script`.
    """
    global is_measuring
    is_measuring = True
    threading.Thread(target=end_with_caller, args=(descriptor, folder), daemon=True).start()
    with os.fdopen(descriptor, "w") as events:

        def write(event: dict[str, Any]) -> None:
            events.write(json.dumps(event) + "\n")
            events.flush()

        try:
            if main_file:
                import_script(main_file, main_package)
            job = torch.load(Path(folder) / JOB, weights_only=False)
            for event in measured_steps(job, way, Path(folder)):
                write(event)
        except (torch.OutOfMemoryError, MemoryError):
            write({"missing": OUT_OF_MEMORY})
        except StreamFXError as error:
            write({"error": str(error)})
        except Exception as error:
            write({"error": describe_error(error)})


def end_with_caller(descriptor: int, folder: str) -> None:
    """Wait until the process that reads the events has ended without ending this one (SIGTERM, SIGKILL); then end, too."""
    reader = select.poll()
    reader.register(descriptor, 0)  # only for errors: nothing reads the pipe
    reader.poll()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def import_script(path: str, package: str | None) -> None:
    """Run a script as the module `IMPORTED`, and let pickled objects find its classes and functions in `__main__`.

    The module stays: Dynamo imports the modules of the functions that it traces.
    """
    module = sys.modules[IMPORTED] = ModuleType(IMPORTED)
    module.__file__, module.__package__ = path, package
    exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))
    vars(sys.modules["__main__"]).update({name: value for name, value in vars(module).items() if not name.startswith("__")})


def measured_steps(job: Job, way: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the figures of each step: forward, backward, and no more; then gradients are freed, and the optimizer runs.

    Gradients are compared in the first step, and in the last one, in which other code may run: with an optimizer, rounding would
    grow meanwhile, and layers that count their calls count more of them with checkpointing.
    """
    job.settings.apply()
    torch.manual_seed(0)
    model, args, kwargs = job.build()
    sources = gradient_sources(model, (args, kwargs))
    tolerance = TOLERANCES.get(lowest_precision([], sources.values()), 1e-2)
    if way == CHECKPOINTING and not enable_checkpointing(model):
        yield {"missing": NO_LAYERS}
        return
    step = prepared_step(way, job, model, args, kwargs)
    optimizer = None if job.optimizer is None else job.optimizer(list(sources.values()))
    memory = PeakMemory(device_of(list(sources.values())))
    for number in range(job.steps):
        memory.start()
        states, begin = generator_states(), time.perf_counter()
        with job.settings.with_autocast():
            loss = step()
        loss.backward()
        value = float(loss.detach())  # waits for the device
        del loss
        event: dict[str, Any] = {"loss": value, "seconds": time.perf_counter() - begin, "peak_bytes": memory.bytes()}
        event |= {"changes": background_bodies.num_changes, "is_random": has_drawn(states)}
        if number == 0 or (number == job.steps - 1 and optimizer is None and way != CHECKPOINTING):  # compiled bodies, maybe
            gradients = {name: source.grad for name, source in sources.items()}
            difference = difference_from_first(folder / GRADIENTS.format(number), value, gradients, tolerance)
            event |= {"difference": difference, "tolerance": tolerance}
        if optimizer is not None:
            optimizer.step()
        for source in sources.values():
            source.grad = None
        yield event


def prepared_step(way: str, job: Job, model: Any, args: Any, kwargs: Any) -> Callable[[], Tensor]:
    """Return a function that computes the loss of the call."""

    def step() -> Tensor:
        return (job.loss or default_loss)(model(*args, **kwargs)).reshape(())

    return torch.compile(step, backend="streambp", options=job.options) if way == STREAMBP else step


def enable_checkpointing(model: Any) -> bool:
    """Checkpoint each layer of a model; return False if it has none.

    A model of transformers knows how, but only in training mode; in evaluation mode, its method has no effect.
    """
    known = [name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(model, f"{name}_enable")]
    if getattr(model, "training", False) and known:  # the first name is the newer one
        try:
            getattr(model, f"{known[0]}_enable")(**{f"{known[0]}_kwargs": {"use_reentrant": False}})
            return True
        except (NotImplementedError, TypeError, ValueError):  # not for this model, or with other arguments
            pass
    layers = layers_of(model)
    for layer in layers:
        layer.forward = checkpointed(layer.forward)
    return bool(layers)


def difference_from_first(path: Path, loss: float, gradients: dict[str, Tensor | None], tolerance: float) -> float | None:
    """Return the largest relative difference of a step's loss and gradients from those of the first way, which leaves them in a
    file and returns None. Differences below the rounding error of the whole gradient count as zero, as in `streamfx.verify`.
    """
    found = {"": torch.tensor(loss, dtype=torch.float64), **gradients}
    found = {key: None if value is None else value.cpu() for key, value in found.items()}
    if not path.exists():
        torch.save(found, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        return None
    expected = torch.load(path, mmap=True)
    present = [value for key, value in expected.items() if key and value is not None]
    norm = sum(float(value.double().square().sum()) for value in present) ** 0.5
    eps = max((torch.finfo(value.dtype).eps for value in present), default=0.0)
    floors = {key: eps / tolerance * norm if key else 0.0 for key in expected}
    return max(relative_difference(found[key], expected[key], floors[key]) for key in expected)
