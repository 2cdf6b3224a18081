"""A decoder that is traced once, for many plans and runs of its halves."""

from contextlib import nullcontext
from typing import Any

from torch import Tensor

from streamfx.ir.facts import Facts, known
from streamfx.ir.program import Program
from streamfx.options import resolve_options
from streamfx.runtime.outer import HostProgramRunner
from tests.support.exactness import TOLERANCE, assert_small, compare, value_errors
from tests.support.stages import Layers, batch
from tests.support.streams import Device

OPTIONS: dict[str, Any] = {"outputs": "dense", "chunk_size": 5, "loss_chunk_size": 5, "offload": "inputs"}


class Traced:
    """A decoder's graph, traced once, for many plans; options default to `OPTIONS`."""

    def __init__(self, model: Layers) -> None:
        (self.recorded,) = compare(model.double(), batch(), chunk_size=5).recorder.compilations
        self.truth, self.outputs = self.recorded.joint_values(), self.recorded.joint_arguments[1]
        self._facts: dict[str, Facts] = {}

    def facts(self, **options: Any) -> Facts:
        given = {**OPTIONS, **options}
        if str(given) not in self._facts:
            self._facts[str(given)] = self.recorded.facts_for(resolve_options(given))
        return self._facts[str(given)]

    def program(self, **options: Any) -> Program:
        return known(self.facts(**options).program)

    def run(self, device: Device | None = None, **options: Any) -> None:
        """Both halves, on a device if one is given; their results are those of the traced graph."""
        program = self.program(**options)
        with nullcontext() if device is None else device.watching():
            actual = self.recorded.streamed_values(program)
        assert_small(value_errors(actual, self.truth, self.outputs), TOLERANCE, str(options))

    def forward(self) -> list[Any]:
        """Run the forward; return its saved values in the backward's order."""
        results = list(HostProgramRunner(self.program().forward)(list(known(self.recorded.primals))))
        return sorted(results[self.outputs :], key=lambda value: isinstance(value, Tensor))

    def backward(self, saved: list[Any]) -> None:
        gradients = HostProgramRunner(known(self.program().backward))([*saved, *known(self.recorded.tangents)])
        assert_small(value_errors(list(gradients), self.truth[self.outputs :], 0), TOLERANCE, "the backward half")
