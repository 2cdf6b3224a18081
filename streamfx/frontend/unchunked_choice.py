"""Choose between loops over chunks and the unchunked graph: a small graph needs no chunks.

An unchunked graph is compiled by Inductor as Dynamo traced it, or runs in eager mode, partitioned by AOTAutograd. It runs if it
fits the memory budget, or if it takes less memory than the loops. *Deferred* outputs (lazy logits) are not computed by the graph.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from streamfx.cost.inductor_choice import compiles_graph, uses_inductor
from streamfx.frontend.split_graphs import SplittableCompilation
from streamfx.ir.dynamic_lengths import Lengths
from streamfx.ir.facts import Facts
from streamfx.lazy import Deferral
from streamfx.lazy.uses import bytes_of_results
from streamfx.node_meta import VALUE
from streamfx.passes.partition.unchunked import find_smaller_unchunked, fits_unchunked
from streamfx.tools.report.fallback_reasons import why_smaller
from streamfx.tools.report.notices import predicted


class FitsUnchunkedError(Exception):
    """Raised while AOTAutograd traces a graph, if it fits without chunks: Inductor then compiles it as Dynamo traced it."""


class ChunkableCompilation(SplittableCompilation):
    """A compilation whose graph runs in loops or unchunked; `deferred` is the graph without deferred outputs, if any."""

    deferred: Deferral | None

    def check_fits_unchunked(self, facts: Facts, forward: fx.GraphModule, backward: fx.GraphModule) -> bool:
        """Return whether AOTAutograd's unchunked forward and backward fit the memory budget; if so, record this in the facts.

        Raise `FitsUnchunkedError` instead if they fit and Inductor compiles such graphs.
        """
        budget, num_outputs = self.options.memory_budget, len(facts.joint.outputs)
        assert budget is not None
        compiled = compiles_graph(self.options, [node.meta.get(VALUE) for node in facts.joint.graph.find_nodes(op="placeholder")])

        def fits(lengths: Lengths) -> bool:
            return fits_unchunked(forward, backward, num_outputs, budget, self.deferred_bytes() if compiled else 0)

        traced = Lengths.of_current_call(facts.joint.graph)
        if (longest := traced.longest_if_longer(fits) if fits(traced) else None) is None:
            return False
        self.record_facts(replace(facts, fits="compiled" if compiled else "eager", lengths=longest))
        if compiled:
            self.raise_fits_unchunked()
        return True

    def deferred_bytes(self) -> int:
        """Return the bytes that outputs take more if none is deferred, as in Inductor's graph; 0 if none is deferred here."""
        return 0 if self.deferred is None else max(0, bytes_of_results(self.module) - bytes_of_results(self.deferred.module))

    def raise_fits_unchunked(self) -> None:
        """Raise `FitsUnchunkedError`, so that Inductor compiles the graph. Tools that only analyze graphs override this."""
        raise FitsUnchunkedError

    def choose_smaller(self, facts: Facts, traced: Facts) -> Facts:
        """Compare the loops of `facts` with the unchunked graphs of the same `traced` graph; return the facts of the smaller.

        If an unchunked graph takes less memory, or there are no loops, its forward and backward graphs are stored in
        `unchunked_halves`. The returned facts then have no loops; they say why, and whether Inductor compiles the graph.
        """
        loops = None if facts.program is None else predicted(facts)
        if (unchunked := find_smaller_unchunked(loops, facts, traced.joint, self.unchunked_builders)) is None:
            return facts
        self.unchunked_halves = unchunked.graphs
        trains = unchunked.graphs[1] is not None
        peak = unchunked.cost.peak
        if loops is None:
            return replace(facts, lengths=unchunked.lengths)
        compiled = trains and uses_inductor(self.options, facts.joint.graph) and peak + self.deferred_bytes() <= loops.peak
        reason = why_smaller(loops.peak, peak)
        return replace(traced, unchunked_reason=reason, fits="compiled" if compiled else None, lengths=unchunked.lengths)
