"""Reports as files and as text for other tools: what `explain` and `plan` have found can all be written so."""

from __future__ import annotations

import os
from abc import abstractmethod
from pathlib import Path

from streamfx.tools.report.diagram import Diagram, as_dot, as_mermaid
from streamfx.tools.report.html import html_of, picture_of
from streamfx.tools.report.page import Page
from streamfx.tools.report.paths import written
from streamfx.tools.report.perfetto import trace_of


class Exports:
    """Ways to look at a prediction, given its page, its timeline and the diagram of its loops."""

    @property
    @abstractmethod
    def page(self) -> Page:
        """What an HTML report shows."""

    @property
    @abstractmethod
    def diagram(self) -> Diagram:
        """Stages, their loops, and what these hand to each other."""

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a report to look at in a browser: one file, which loads nothing.

        Args:
            path: of the file to write.

        Returns:
            Its path.

        Raises:
            ReportError: the file cannot be written.

        Example:
            >>> import tempfile, torch, streamfx
            >>> weight = torch.randn(8, 8, requires_grad=True)
            >>> found = streamfx.explain(lambda x: (x @ weight).square().mean(), torch.randn(2, 64, 8), chunk_size=16)
            >>> found.to_html(tempfile.mkdtemp() + "/step.html").name
            'step.html'
        """
        return written(path, html_of(self.page))

    def to_svg(self, path: str | os.PathLike[str]) -> Path:
        """Write memory over the step, beside other ways of running it, as a picture for a page or a paper.

        Args:
            path: of the file to write.

        Returns:
            Its path.

        Raises:
            ReportError: the file cannot be written.

        Example:
            >>> import tempfile, torch, streamfx
            >>> weight = torch.randn(8, 8, requires_grad=True)
            >>> found = streamfx.explain(lambda x: (x @ weight).square().mean(), torch.randn(2, 64, 8), chunk_size=16)
            >>> found.to_svg(tempfile.mkdtemp() + "/step.svg").name
            'step.svg'
        """
        return written(path, picture_of(self.page.timeline))

    def to_perfetto(self, path: str | os.PathLike[str]) -> Path:
        """Write a predicted trace that ui.perfetto.dev and chrome://tracing open: bytes by term as counters, stages and loops as
        tracks, over predicted seconds.

        Args:
            path: of the file to write.

        Returns:
            Its path.

        Raises:
            ReportError: the file cannot be written.

        Example:
            >>> import tempfile, torch, streamfx
            >>> weight = torch.randn(8, 8, requires_grad=True)
            >>> found = streamfx.explain(lambda x: (x @ weight).square().mean(), torch.randn(2, 64, 8), chunk_size=16)
            >>> found.to_perfetto(tempfile.mkdtemp() + "/step.json").name
            'step.json'
        """
        page = self.page
        stage_of = {run: name for line in page.stages for run, name in line.loops_of_stages}
        return written(path, trace_of(page.timeline, stage_of))

    def to_mermaid(self) -> str:
        """Stages and loops as a Mermaid flowchart, which GitHub and many editors draw; stages that are alike are one.

        Returns:
            The text, without a fence around it.

        Example:
            >>> import torch, streamfx
            >>> weight = torch.randn(8, 8, requires_grad=True)
            >>> found = streamfx.explain(lambda x: (x @ weight).square().mean(), torch.randn(2, 64, 8), chunk_size=16)
            >>> found.to_mermaid().splitlines()[0]
            'flowchart TB'
        """
        return as_mermaid(self.diagram)

    def to_dot(self) -> str:
        """Stages and loops as a graph for Graphviz; stages that are alike are one.

        Returns:
            The text.

        Example:
            >>> import torch, streamfx
            >>> weight = torch.randn(8, 8, requires_grad=True)
            >>> found = streamfx.explain(lambda x: (x @ weight).square().mean(), torch.randn(2, 64, 8), chunk_size=16)
            >>> found.to_dot().splitlines()[0]
            'digraph streamfx {'
        """
        return as_dot(self.diagram)
