"""Steps under a memory budget: measured, and searches for their plans."""

from typing import Any

import pytest
import torch

from streamfx.cost.memory import cost_of
from streamfx.cost.meter import Meter
from streamfx.ir.facts import Facts
from streamfx.ir.program import Program
from streamfx.options import Options
from streamfx.passes import plan_simulator
from streamfx.passes.partition.budget_search import LadderSearch
from streamfx.passes.partition.plan_simulator import held_bytes
from streamfx.runtime.outer import HostProgramRunner
from tests.support import hf
from tests.support.exactness import recorder
from tests.support.hf import ROTARY


def ladder_of(facts: Facts, options: Options, budget: int = 1 << 60) -> LadderSearch:
    """The search for a budget, in bytes."""
    return LadderSearch(plan_simulator(facts, options), budget)


LENGTH, LAYERS = 1024, 3
WIDE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "max_position_embeddings": LENGTH}
CHUNKS = {"chunk_size": 128, "loss_chunk_size": 128}


class Step:
    """A training step of a wider model that is compiled with some options, measured as it runs."""

    def __init__(self, make: Any = hf.llama, layers: int = LAYERS, **options: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**WIDE, "num_hidden_layers": layers}.items():
                patch.setitem(ROTARY, name, value)
            self.model = make()
        self.ids, self.backend = torch.randint(1, hf.VOCABULARY, (1, LENGTH)), recorder(**{"outputs": "lazy", **options})
        self.compiled = torch.compile(lambda ids: self.model(input_ids=ids, labels=ids).loss, backend=self.backend)

    def peak(self) -> int:
        """The most live bytes in a run after the first, beyond those live before it."""
        for _ in range(2):  # the first one compiles
            self.model.zero_grad(set_to_none=True)
            with Meter() as meter:
                self.compiled(self.ids).backward()
        return meter.peak

    @property
    def program(self) -> Program:
        (facts,) = self.backend.facts
        assert facts.program is not None
        return facts.program

    def predicted(self) -> int:
        return cost_of(self.program.forward, self.program.backward, 1).peak

    def held(self) -> int:
        return held_bytes(self.program.forward.graph)


def peak_as_predicted(recorded: Any, program: Program | None) -> int:
    """Runs both halves on real tensors, holding nothing that the backward half frees: bytes that were alive at the peak."""
    assert program is not None and program.backward is not None
    with Meter() as meter:
        results = list(HostProgramRunner(program.forward)(list(recorded.primals)))
        saved = results[1:]
        arguments = [*saved[len(program.saved) :], *saved[: len(program.saved)], *recorded.tangents]
        del results, saved
        HostProgramRunner(program.backward)(arguments)
    assert meter.peak == pytest.approx(cost_of(program.forward, program.backward, 1).peak, rel=0.05)
    return meter.peak
