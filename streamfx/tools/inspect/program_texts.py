"""Texts of the rewritten program of an explained call: loop bodies, one runnable module, and the result of each pass."""

from __future__ import annotations

from functools import cached_property

from torch import fx

from streamfx.argument_checks import require
from streamfx.errors import ReportError
from streamfx.log import log
from streamfx.tools.inspect.tracing import TracedCall
from streamfx.tools.report.as_python.input_names import input_names
from streamfx.tools.report.as_python.stage_code import StageCode, stage_codes
from streamfx.tools.report.as_python.step_module import StepGraph, StepModuleWriter
from streamfx.tools.report.loop_bodies import bodies_of, bodies_of_module, python_of
from streamfx.tools.report.pass_texts import PassText, diff_of


class ProgramTexts:
    """Mixin that prints the rewritten program of `call`."""

    call: TracedCall

    @property
    def graphs(self) -> dict[str, fx.GraphModule]:
        """The bodies of all loops by name: the graphs that run once per chunk."""
        return bodies_of([graph.facts for graph in self.call.graphs])

    def print_readable(self, module: str | None = None, print_output: bool = True) -> str:
        """Print and return loop bodies as runnable Python: one class per loop, whose `forward` computes a chunk.

        Args:
            module: the name of a module (`"model.layers.1"`), which selects the stages that contain it; None selects all.
            print_output: whether to print the text as well.

        Returns:
            The text.

        Raises:
            ReportError: no such module is streamed; the message lists similar names.

        Example:
            >>> import torch, streamfx
            >>> found = streamfx.explain(torch.nn.Linear(8, 8), torch.randn(2, 64, 8), chunk_size=16)
            >>> "def forward(" in found.print_readable(print_output=False)
            True
        """
        requirement = "print_readable takes the name of a module"
        remedy = "give it as a string, or None for the full model"
        require(module is None or isinstance(module, str), ReportError, requirement, module, remedy)
        facts = [graph.facts for graph in self.call.graphs]
        text = python_of(bodies_of(facts) if module is None else bodies_of_module(module, facts))
        if print_output:
            print(text)
        return text

    def code(self, stage: int | str | None = None, half: str | None = None) -> str:
        """Return the rewritten step as one runnable Python module: host programs, and a function for each loop over chunks.

        A loop's slices, buffers and totals are written out, and comments have the lines of the model's code. Equal loops, as
        those of equal layers, are written once. The module has `step(*inputs)`, which returns the outputs and the gradients of
        the inputs; `INPUTS` names the inputs in order. A part that cannot run as text raises `ReportError` when it is used.

        Args:
            stage: the index or the name of a stage, for the functions of its loops only; None for the full module.
            half: "forward" or "backward"; None for both.

        Returns:
            The text.

        Raises:
            ReportError: no such stage or half.

        Example:
            >>> import torch, streamfx
            >>> found = streamfx.explain(torch.nn.Linear(8, 8), torch.randn(2, 64, 8), chunk_size=16)
            >>> "for start in range(0, length, chunk_size):" in found.code()
            True
        """
        return self._writer().text(stage, half)

    def stage_codes(self) -> tuple[StageCode, ...]:
        """Return the code of the loops of each stage, with the lines of the model in it; empty if it cannot be written.

        Returns:
            The stages in order; stages with equal loops are one.

        Example:
            >>> import torch, streamfx
            >>> found = streamfx.explain(torch.nn.Linear(8, 8), torch.randn(2, 64, 8), chunk_size=16)
            >>> [code.num_loops for code in found.stage_codes()]
            [2]
        """
        try:
            return stage_codes(self._writer().loop_functions())
        except Exception as error:  # a report without code is better than none
            log.info("the code of the loops is not in the report: %s", error)
            return ()

    def _writer(self) -> StepModuleWriter:
        """Return a writer of all graphs of the call."""
        graphs = [
            StepGraph(*graph.that_run, graph.num_outputs, graph.facts, input_names(graph.module, graph.facts))
            for graph in self.call.graphs
        ]
        return StepModuleWriter(graphs, self.call.name)

    def passes(self) -> list[str]:
        """Return the names of the passes that ran, in order: those that `diff` and `STREAMFX_LOGS` take.

        Returns:
            The names, each once. It is empty if nothing was traced in full (a plan that traces few layers for all).

        Example:
            >>> import torch, streamfx
            >>> found = streamfx.explain(torch.nn.Linear(8, 8), torch.randn(2, 64, 8), chunk_size=16)
            >>> found.passes()[:3]
            ['unshard', 'canonicalize', 'recurrences']
        """
        return list(dict.fromkeys(name for texts in self._pass_texts for name in texts))

    def diff(self, before: str, after: str, graph: int = 0) -> str:
        """Return what passes changed, as a unified diff of the graph and of the results of all passes up to each of two.

        Args:
            before, after: names of passes, or of packages of passes (`"partition"`), which represent their last pass.
            graph: the index of the graph, if the call has several.

        Returns:
            The text; empty if nothing changed.

        Raises:
            ReportError: no such pass ran.

        Example:
            >>> import torch, streamfx
            >>> found = streamfx.explain(torch.nn.Linear(8, 8), torch.randn(2, 64, 8), chunk_size=16)
            >>> found.diff("key_spans", "stages").splitlines()[:2]
            ['--- after key_spans', '+++ after stages']
        """
        texts = self._pass_texts
        require(graph in range(len(texts)), ReportError, "diff takes the index of a graph", graph, f"there are {len(texts)}")
        return diff_of(texts[graph], before, after)

    @cached_property
    def _pass_texts(self) -> list[dict[str, PassText]]:
        """The texts of all passes, by graph; the passes run again for them."""
        return [graph.pass_texts() for graph in self.call.graphs]
