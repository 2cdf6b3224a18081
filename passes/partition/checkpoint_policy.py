"""Select the values that a stage keeps so that the backward graph does not recompute them.

Each level includes the previous ones:

* inputs: the stage's inputs, and the first layer's input if it is a sum over ranks;
* attention: results and log-sum-exps of fused attention, and values computed between loops (`interloop_values.py`);
* projections: results of products before the point after attention with the fewest live bytes, and the values alive there.
  In most decoders these are the query, key and value projections, and the residual stream before the MLP;
* products: results of all products, so that the backward graph recomputes element-wise operators only.

A *product* is a matrix product or a recurrence; a *sequence-shaped* value has a row for each row of the sequence. Stage inputs
are always kept: they are outputs of earlier stages.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable

from torch import fx

from streamfx.cost.memory import bytes_like
from streamfx.ir.facts import Facts
from streamfx.ir.joint import walk
from streamfx.ir.stage import Stage
from streamfx.node_meta import VALUE
from streamfx.options import SAVE_LEVELS
from streamfx.passes.ops.collectives import is_reduced_over_ranks
from streamfx.passes.ops.traits import is_expensive


def kept_values(stage: Stage, facts: Facts, level: str) -> tuple[fx.Node, ...]:
    """Return the values of a stage, in graph order, that are kept for backward in addition to its outputs.

    `level` is "inputs", "attention", "projections" or "products"; each includes the previous ones.
    """
    level_index = SAVE_LEVELS.index(level)
    if stage.gradient_in_forward:  # its backward graph runs in the forward graph
        return ()
    values = _StageValues(stage, facts)
    kept = values.sums_before_attention() if stage is facts.stages[0] else []
    kept += values.attention_results() if level_index >= SAVE_LEVELS.index("attention") else []
    if level_index >= SAVE_LEVELS.index("projections"):
        narrowest_position, live_values = values.find_narrowest_point()
        kept += [node for node in values.recomputed_rows(kept) if node in live_values]
        last_position = len(stage.forward) if level == "products" else narrowest_position
        early = [node for node in values.recomputed_rows(kept) if values.position[node] <= last_position]
        kept += [node for node in early if is_reduced_over_ranks(node)]  # instead of the products before the reduction
        kept += [node for node in values.recomputed_rows(kept) if is_expensive(node) and values.position[node] <= last_position]
    return tuple(sorted(dict.fromkeys(kept), key=values.position.__getitem__))


class _StageValues:
    """Queries on one stage: its positions, live values, and values that the backward graph recomputes."""

    def __init__(self, stage: Stage, facts: Facts) -> None:
        """`position`: the index of each forward operator in the stage."""
        self.stage, self.facts, self.axes, self.spans = stage, facts, facts.axes, facts.key_spans.spans
        self.position = {node: i for i, node in enumerate(stage.forward)}

    def is_rows(self, node: fx.Node) -> bool:
        """Return whether a value is sequence-shaped, and computed by this stage, but not one of its outputs."""
        return node in self.position and node not in self.stage.outputs and self.facts.has_rows(node)

    def is_attention(self, node: fx.Node) -> bool:
        """Return whether an operator is a fused attention: its axis rule (signature) has key positions."""
        signature = self.axes.signatures.get(node)
        return signature is not None and bool(signature.keys)

    def sums_before_attention(self) -> list[fx.Node]:
        """Return sums over ranks before the first attention: with a sharded embedding, the first layer's input."""
        attentions = [i for node, i in self.position.items() if node in self.spans and node not in self.axes.static]
        attention_start = min(attentions, default=0)
        rows = self.recomputed_rows(())
        return [node for node in rows if is_reduced_over_ranks(node) and self.position[node] < attention_start]

    def attention_results(self) -> list[fx.Node]:
        """Return results of fused attention (also log-sum-exps) that are used outside the stage's forward graph: in backward."""
        results = [node for node in self.stage.forward if node.target is operator.getitem and self.is_attention(node.args[0])]  # type: ignore[arg-type]
        return [node for node in results if any(user not in self.position for user in node.users)]

    def recomputed_rows(self, kept: Iterable[fx.Node]) -> list[fx.Node]:
        """Return the sequence-shaped values of the stage, in order, that its backward graph recomputes if `kept` is kept.

        These are the operands of backward operators, and their ancestors up to kept values and the stage's outputs.
        """
        available = {*kept, *self.stage.outputs}

        def missing_operands(node: fx.Node) -> list[fx.Node]:
            """Return a node's operands of the stage's forward graph that are not available."""
            return [source for source in node.all_input_nodes if source in self.position and source not in available]

        recomputed = set(walk((source for node in self.stage.backward for source in missing_operands(node)), missing_operands))
        return [node for node in self.stage.forward if node in recomputed and self.is_rows(node)]

    def find_narrowest_point(self) -> tuple[int, Collection[fx.Node]]:
        """Return the position of the operator after which the fewest bytes are live, and the values alive there.

        Positions after the last attention and before the last product are candidates; without one, return -1 and no values.
        """
        attentions = [i for node, i in self.position.items() if node in self.spans and node not in self.axes.static]
        products = [i for node, i in self.position.items() if is_expensive(node)]
        if not attentions or not products:
            return -1, ()
        live_values = self.live_values()
        candidates = range(max(attentions) + 1, max(products))
        narrowest = min(candidates, key=lambda i: sum(bytes_like(node.meta[VALUE]) for node in live_values[i]), default=-1)
        return narrowest, live_values[narrowest] if narrowest >= 0 else ()

    def live_values(self) -> list[set[fx.Node]]:
        """Return, for each operator of the stage, the sequence-shaped values that are live after it.

        A value is live if a later operator reads it or the stage returns it.
        """
        live = set(self.stage.outputs)
        by_position: list[set[fx.Node]] = []
        for node in reversed(self.stage.forward):
            by_position.append({value for value in live if self.facts.has_rows(value)})
            live.discard(node)
            live |= set(node.all_input_nodes)
        return by_position[::-1]
