"""Which values does a stage keep for the backward half, which would compute them a second time?

Each level keeps what the ones before it keep:

* inputs: nothing beside what enters the stage, or the first layer where it is a sum over ranks;
* attention: results and log-sum-exps of fused attention, and what is made between loops (`between.py`);
* projections: results of the products up to the narrowest place after the attention, and what is alive there. On most
  decoders these are queries, keys and values as their products make them, and the residual stream between attention and MLP;
* products: results of all products: what is left to the backward half is element by element.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable

from torch import fx

from streamfx.cost.memory import bytes_like
from streamfx.ir.facts import Facts, StorageClass
from streamfx.ir.joint import is_tensor
from streamfx.ir.stage import Stage
from streamfx.node_meta import VALUE
from streamfx.options import SAVE_LEVELS
from streamfx.passes.ops.collectives import is_reduced_over_ranks
from streamfx.passes.ops.traits import is_expensive


def kept_values(stage: Stage, facts: Facts, level: str) -> tuple[fx.Node, ...]:
    """The values of a stage that are kept at a level, beside its outputs."""
    number = SAVE_LEVELS.index(level)
    if stage.gradient_in_forward:  # there is nothing left to do in the backward half
        return ()
    saving = _Saving(stage, facts)
    kept = saving.entering() if stage is facts.stages[0] else []
    kept += saving.attention_results() if number >= SAVE_LEVELS.index("attention") else []
    if number >= SAVE_LEVELS.index("projections"):
        place, alive = saving.narrowest()
        kept += [node for node in saving.made_again(kept) if node in alive]
        last = len(stage.forward) if level == "products" else place
        early = [node for node in saving.made_again(kept) if saving.position[node] <= last]
        kept += [node for node in early if is_reduced_over_ranks(node)]  # then nobody asks for the products that they are made of
        kept += [node for node in saving.made_again(kept) if is_expensive(node) and saving.position[node] <= last]
    return tuple(sorted(dict.fromkeys(kept), key=saving.position.__getitem__))


class _Saving:
    def __init__(self, stage: Stage, facts: Facts) -> None:
        self.stage, self.axes, self.demand, self.spans = stage, facts.axes, facts.demand, facts.causality.spans
        self.position = {node: i for i, node in enumerate(stage.forward)}

    def has_rows(self, node: fx.Node) -> bool:
        return is_tensor(node) and node not in self.axes.static and self.demand.form(node) is StorageClass.ROWS

    def is_rows(self, node: fx.Node) -> bool:
        """Whether a value of the stage is made row by row, and can be kept so."""
        return node in self.position and node not in self.stage.outputs and self.has_rows(node)

    def is_attention(self, node: fx.Node) -> bool:
        signature = self.axes.signatures.get(node)
        return signature is not None and bool(signature.keys)

    def entering(self) -> list[fx.Node]:
        """What is reduced over ranks in front of the first attention: where the embedding is cut, what enters the first layer."""
        attentions = [i for node, i in self.position.items() if node in self.spans and node not in self.axes.static]
        first = min(attentions, default=0)
        return [node for node in self.made_again(()) if is_reduced_over_ranks(node) and self.position[node] < first]

    def attention_results(self) -> list[fx.Node]:
        """Results of fused attention that are used outside of the stage's forward half."""
        results = [node for node in self.stage.forward if node.target is operator.getitem and self.is_attention(node.args[0])]  # type: ignore[arg-type]
        return [node for node in results if any(user not in self.position for user in node.users)]

    def made_again(self, kept: Iterable[fx.Node]) -> list[fx.Node]:
        """The rows that the backward half computes again when these are kept."""
        there = {*kept, *self.stage.outputs}
        todo = [source for node in self.stage.backward for source in node.all_input_nodes]
        found: set[fx.Node] = set()
        while todo:
            node = todo.pop()
            if node in self.position and node not in there and node not in found:
                found.add(node)
                todo += node.all_input_nodes
        return [node for node in self.stage.forward if node in found and self.is_rows(node)]

    def narrowest(self) -> tuple[int, Collection[fx.Node]]:
        """Where between the last attention and the last product the fewest bytes are alive, and what."""
        attentions = [i for node, i in self.position.items() if node in self.spans and node not in self.axes.static]
        products = [i for node, i in self.position.items() if is_expensive(node)]
        if not attentions or not products:
            return -1, ()
        alive = self.alive()
        places = range(max(attentions) + 1, max(products))
        best = min(places, key=lambda i: sum(bytes_like(node.meta[VALUE]) for node in alive[i]), default=-1)
        return best, alive[best] if best >= 0 else ()

    def alive(self) -> list[set[fx.Node]]:
        """Rows that the rest of the stage uses, after each position; those that enter the stage included."""
        wanted = set(self.stage.outputs)
        found: list[set[fx.Node]] = []
        for node in reversed(self.stage.forward):
            found.append({item for item in wanted if self.has_rows(item)})
            wanted.discard(node)
            wanted |= set(node.all_input_nodes)
        return found[::-1]
