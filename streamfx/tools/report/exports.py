"""Export the results of `explain` and `plan` as files and as text for other tools."""

from __future__ import annotations

import os
from abc import abstractmethod
from pathlib import Path

from streamfx.argument_checks import describe_value, require
from streamfx.errors import ReportError
from streamfx.tools.report.diagram import Diagram, as_dot, as_mermaid
from streamfx.tools.report.html import comparison_html_of, html_of, picture_of
from streamfx.tools.report.page import Page
from streamfx.tools.report.paths import written
from streamfx.tools.report.timeline import trace_of


class Exports:
    """Mixin that exports a prediction, given its page, its timeline and the diagram of its loops."""

    @property
    @abstractmethod
    def page(self) -> Page:
        """The contents of an HTML report."""

    @property
    @abstractmethod
    def diagram(self) -> Diagram:
        """The stages, their loops, and the traffic between loops."""

    def to_html(self, path: str | os.PathLike[str], beside: Exports | None = None) -> Path:
        """Write an HTML report: one self-contained file that loads nothing from the network.

        Args:
            path: The file to write.
            beside: Another report. The page then compares both: figures in columns, and both curves on one scale.

        Returns:
            The path of the file.

        Raises:
            ReportError: If the file cannot be written, or `beside` is no report.

        Example:
            >>> import tempfile, torch, streamfx
            >>> found = streamfx.explain(torch.nn.Linear(8, 8), torch.randn(2, 64, 8), chunk_size=16)
            >>> found.to_html(tempfile.mkdtemp() + "/step.html").name
            'step.html'
        """
        if beside is None:
            return written(path, html_of(self.page))
        do = "give another result of streamfx.explain or streamfx.plan"
        require(isinstance(beside, Exports), ReportError, "beside takes a report", describe_value(beside), do)
        return written(path, comparison_html_of(self.page, beside.page))

    def to_svg(self, path: str | os.PathLike[str]) -> Path:
        """Write a chart of memory over the step, compared with its baselines, as an SVG for a page or a paper.

        Args:
            path: The file to write.

        Returns:
            The path of the file.

        Raises:
            ReportError: If the file cannot be written.

        Example:
            >>> import tempfile, torch, streamfx
            >>> found = streamfx.explain(torch.nn.Linear(8, 8), torch.randn(2, 64, 8), chunk_size=16)
            >>> found.to_svg(tempfile.mkdtemp() + "/step.svg").name
            'step.svg'
        """
        return written(path, picture_of(self.page.timeline))

    def to_perfetto(self, path: str | os.PathLike[str]) -> Path:
        """Write a predicted trace that ui.perfetto.dev and chrome://tracing open.

        It shows bytes by category as counters, and stages and loops as tracks, over predicted seconds.

        Args:
            path: The file to write.

        Returns:
            The path of the file.

        Raises:
            ReportError: If the file cannot be written.

        Example:
            >>> import tempfile, torch, streamfx
            >>> found = streamfx.explain(torch.nn.Linear(8, 8), torch.randn(2, 64, 8), chunk_size=16)
            >>> found.to_perfetto(tempfile.mkdtemp() + "/step.json").name
            'step.json'
        """
        page = self.page
        stage_of = {run: name for line in page.stages for run, name in line.loops_of_stages}
        return written(path, trace_of(page.timeline, stage_of))

    def to_mermaid(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return stages and loops as a Mermaid flowchart, which GitHub and many editors draw; similar stages share one node.

        Args:
            path: The file to write the text to; None writes no file.

        Returns:
            The text, without a code fence.

        Raises:
            ReportError: If the file cannot be written.

        Example:
            >>> import torch, streamfx
            >>> found = streamfx.explain(torch.nn.Linear(8, 8), torch.randn(2, 64, 8), chunk_size=16)
            >>> found.to_mermaid().splitlines()[0]
            'flowchart TB'
        """
        return _text_and_file(as_mermaid(self.diagram), path)

    def to_dot(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return stages and loops as a graph for Graphviz; similar stages share one node.

        Args:
            path: The file to write the text to; None writes no file.

        Returns:
            The text.

        Raises:
            ReportError: If the file cannot be written.

        Example:
            >>> import torch, streamfx
            >>> found = streamfx.explain(torch.nn.Linear(8, 8), torch.randn(2, 64, 8), chunk_size=16)
            >>> found.to_dot().splitlines()[0]
            'digraph streamfx {'
        """
        return _text_and_file(as_dot(self.diagram), path)


def _text_and_file(text: str, path: str | os.PathLike[str] | None) -> str:
    """Write a text to a file if a path is given, and return the text."""
    if path is not None:
        written(path, text)
    return text
