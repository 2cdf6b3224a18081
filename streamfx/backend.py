"""What `torch.compile(model, backend="streambp")` calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from streamfx.capture import captured
from streamfx.errors import NotStreamed
from streamfx.ir.facts import Facts
from streamfx.options import Options, resolved
from streamfx.passes import run_pipeline
from streamfx.runtime.outer import OuterRunner
from streamfx.torch_private import aot_autograd, default_partition, keep_saved_tensors


def streambp(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Any = None, mode: str | None = None
) -> Callable[..., Any]:
    """The backend: a Dynamo graph and its inputs in, a callable with the same results out."""
    return Compilation(module, resolved(options)).compile(example_inputs)


@dataclass
class Compilation:
    """One graph on its way through AOTAutograd; `facts` are what the passes found, for reports."""

    module: fx.GraphModule
    options: Options
    facts: list[Facts] = field(default_factory=list)

    def compile(self, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiler = aot_autograd(
            fw_compiler=self.run_forward,
            bw_compiler=self.run,
            inference_compiler=self.run_inference,
            partition_fn=self.partition,
            decompositions={},
        )
        return compiler(self.module, list(example_inputs))

    def partition(
        self,
        joint: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **others: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Called by AOTAutograd: the joint graph in, the forward and the backward graph out."""

        def plain() -> tuple[fx.GraphModule, fx.GraphModule]:
            return default_partition(
                joint,
                joint_inputs,
                num_fwd_outputs=num_fwd_outputs,
                static_lifetime_input_indices=static_lifetime_input_indices,
                **others,
            )

        if not isinstance(joint_inputs, tuple):  # the body of a nested region: not ours to rewrite
            return plain()
        facts = captured(joint, len(joint_inputs[0]), num_fwd_outputs, static_lifetime_input_indices or ())
        facts = self.analysed(facts)
        if facts.program is None:
            return plain()
        return facts.program.forward, facts.program.backward

    def analysed(self, facts: Facts) -> Facts:
        facts = run_pipeline(facts, self.options)
        self.facts.append(facts)
        if self.options.strict and (reasons := facts.reasons()):
            raise NotStreamed(
                "strict=True asks that every stage streams",
                found="; ".join(reasons),
                do="change the code named above, or drop strict=True: the result is exact either way",
            )
        return facts

    def run_forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        keep_saved_tensors()
        return self.run(module, inputs)

    def run(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return OuterRunner(module)

    def run_inference(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """A graph without gradients: the same forward loops, nothing saved."""
        facts = self.analysed(captured(module, len(inputs), len(_outputs(module))))
        return OuterRunner(facts.program.forward if facts.program is not None else module)


def _outputs(module: fx.GraphModule) -> Sequence[Any]:
    results = module.graph.output_node().args[0]
    return results if isinstance(results, (tuple, list)) else (results,)


