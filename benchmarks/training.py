"""One way of training one small decoder: what is measured, in the process that is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from benchmarks.flop_formulas import counted
from benchmarks.live_bytes import peak_live_bytes
from examples.peak_memory import PeakMemory
from examples.workload import small_config

COMPILED: dict[str, tuple[str, dict[str, Any]]] = {
    "inductor": ("inductor", {}),
    "aot_eager": ("aot_eager", {}),
    "streambp": ("streambp", {"bodies": "eager", "outputs": "dense"}),
    "streambp, inductor bodies": ("streambp", {"bodies": "inductor", "outputs": "dense"}),
}


@dataclass(frozen=True)
class Training:
    """`method` is eager, checkpointing or one of `COMPILED`; sizes that are not given are the built-in model's."""

    method: str
    length: int
    sizes: dict[str, int]
    options: dict[str, Any]

    @cached_property
    def model(self) -> Any:
        from transformers import AutoModelForCausalLM, logging

        logging.set_verbosity_error()
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small_config(**self.sizes)).train()
        if self.method == "checkpointing":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    @cached_property
    def ids(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, self.model.config.vocab_size, (1, self.length), generator=generator)

    def plain_loss(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss

    @cached_property
    def loss_of(self) -> Callable[[torch.Tensor], torch.Tensor]:
        if self.method not in COMPILED:
            return self.plain_loss
        backend, options = COMPILED[self.method]
        compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(
            self.plain_loss, backend=backend, options={**options, **self.options} or None
        )
        return compiled

    def step(self) -> float:
        loss = self.loss_of(self.ids)
        loss.backward()
        value = loss.item()
        self.model.zero_grad()
        return value

    def prepare(self) -> None:
        """Make the model and its input, so that only the step is measured."""
        assert self.loss_of is not None
        assert self.ids is not None

    def measured(self) -> dict[str, float]:
        """One step: wall and processor seconds, and the process's high-water mark over the state before."""
        self.prepare()
        memory = PeakMemory(torch.device("cpu"))
        memory.start()
        wall, processor = time.perf_counter(), time.process_time()
        loss = self.step()
        return {
            "seconds": time.perf_counter() - wall,
            "cpu_seconds": time.process_time() - processor,
            "peak_bytes": memory.bytes(),
            "loss": loss,
        }

    def live(self) -> dict[str, int]:
        """The most bytes of tensors that are alive at once in a step, over those before it."""
        return {"live_bytes": peak_live_bytes(self.step)}

    def predicted(self) -> dict[str, int]:
        """The same, as `streamfx.explain` foretells it."""
        import streamfx

        options = {**COMPILED[self.method][1], **self.options}
        return {"predicted_bytes": streamfx.explain(self.plain_loss, self.ids, options=options).summary()["peak_bytes"]}

    def flops(self) -> dict[str, int]:
        attention, other = counted(self.step)
        return {"attention": attention, "other": other}
