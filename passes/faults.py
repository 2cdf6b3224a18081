"""Where a pass raises an exception that it did not mean to raise, the graph is planned without what it failed at.

Which operator a pass was looking at, the traceback tells: the innermost frame that has one in a variable. Passes begin again, on
a fresh copy of the traced graph, with one remedy more, until they come to an end:

    the operator runs whole            as where a pass raises `RunsWhole`; passes behind `demand` see that
    no pass knows what it is           its target is `Untouched`, for which there are no rules and no equations
    the pass is left out               where it only makes steps smaller or faster
    an earlier pass is left out        where nothing else helps: it may have written the operator, which no traced one stands for
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from streamfx.errors import NotStreamedError, StreamFXError, told
from streamfx.ir.facts import Facts
from streamfx.ir.joint import JointGraph, is_assertion, is_size, is_tensor, joint_graph
from streamfx.log import log
from streamfx.node_meta import JOINT, ORIGIN, TRACED, WHY_WHOLE
from streamfx.passes.ops.aliasing import is_view
from streamfx.passes.ops.collectives import is_collective
from streamfx.passes.ops.fallback import FallbackError
from streamfx.passes.ops.traits import READS_STRIDES, is_random, producer_of
from streamfx.passes.rewrite.views.strided_access import shown_by
from streamfx.runtime.restride import RestridedOperator
from streamfx.torch_private import OpOverload
from streamfx.torch_private.lines import source_line

MOST = 8  # remedies at operators, for one pass
COSTS_LITTLE = frozenset(
    {"loss gradient", "buckets", "visibility", "lower"}
)  # to leave out: an operator that runs whole costs more
REWRITES = frozenset({"joined keys", "keys in blocks", "sums along the sequence", "own tables", "sums over ranks"})
WRITE_OPERATORS = ("loss gradient", *sorted(REWRITES), "recurrences")  # left out if nothing else helps, in this order
MAY_BE_LEFT_OUT = COSTS_LITTLE | REWRITES | {"recurrences"}
FAILED_AT = "{target} runs whole, as the pass '{step}' failed at it ({error})"
LEFT_OUT = "the pass '{step}' is left out, as {failed} failed ({error})"
EXACT = "%s. The result is exact; strict=True raises an error instead"


class PassFailedError(Exception):
    """A pass has raised an exception that it did not mean to raise."""

    def __init__(self, step: str, facts: Facts, error: Exception) -> None:
        super().__init__(f"{step}: {told(error)}")
        self.step, self.facts, self.error = step, facts, error

    def operators(self) -> Iterator[fx.Node]:
        """The operators of the graph that the pass was looking at, those of the innermost frame first."""
        by_name = {node.name: node for node in self.facts.joint.graph.nodes}
        frames = [frame for frame, _ in traceback.walk_tb(self.error.__traceback__)]
        for value in (value for frame in reversed(frames) for value in frame.f_locals.values()):
            if isinstance(value, fx.Node):
                own = by_name.get(value.meta.get(TRACED) or value.meta.get(JOINT, value.name))  # it may be one of a program
                if own is not None and own.op == "call_function":
                    yield producer_of(own)

    def refused(self) -> NotStreamedError:
        """The error in its place, where everything is to stream."""
        node = next(self.operators(), None)
        at = "" if node is None else f" at {node.target}"
        return NotStreamedError(
            "strict=True asks that every stage streams",
            found=f"the pass '{self.step}' failed{at} ({told(self.error)})",
            where="" if node is None else source_line(node),
            do="drop strict=True: what it failed at runs whole, and the result is exact; or write that line in another way",
        )


def guarded(step: str, facts: Facts, apply: Callable[[Facts], Facts]) -> Facts:
    """What a pass makes of facts; an exception that it did not mean to raise becomes `PassFailedError`."""
    try:
        return apply(facts)
    except (PassFailedError, FallbackError, StreamFXError):
        raise
    except Exception as error:
        raise PassFailedError(step, facts, error) from error


@dataclass
class Remedies:
    """What a graph is planned without, each with the reason: operators that run `whole`, those of them that are `unknown` to all
    passes, by name, and passes that are `left_out`. `traced` are the operators of the graph, `shown` those of them through which
    a result shows memory.
    """

    whole: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    traced: Mapping[str, fx.Node] = field(default_factory=dict)
    shown: frozenset[fx.Node] = frozenset()
    tried: Counter[str] = field(default_factory=Counter)
    kinds: Counter[tuple[Any, ...]] = field(default_factory=Counter)

    def applied(self, facts: Facts) -> Facts:
        """A graph as it was traced, to begin with."""
        self.traced = {node.name: node for node in facts.joint.graph.nodes}
        self.shown = _shown(facts.joint)
        for name, why in self.unknown.items():
            _write_untouched(self.traced[name], why)
        if self.unknown:
            facts = replace(facts, joint=joint_graph(facts.joint.graph, len(facts.joint.primals), len(facts.joint.outputs)))
        return replace(facts, whole=dict(self.whole), faults=tuple(self.faults))

    def help_with_refusal(self, refused: FallbackError) -> bool:
        """Whether there is a remedy where a pass says that an operator has to run whole."""
        if refused.name not in self.whole:
            self.whole[refused.name] = refused.why
            return True
        return refused.name in self.traced and self._make_unknown(self.traced[refused.name], refused.why)

    def help_with(self, failed: PassFailedError) -> bool:
        """Whether there is a remedy for an exception that a pass did not mean to raise."""
        if failed.step in COSTS_LITTLE:
            return self._leave_out(failed)
        if self.tried[failed.step] < MOST and any(self._help_at(node, failed) for node in failed.operators()):
            self.tried[failed.step] += 1
            return True
        return self._leave_out(failed) or any(self._leave_out(failed, step) for step in WRITE_OPERATORS)

    def _leave_out(self, failed: PassFailedError, step: str = "") -> bool:
        """Whether the pass that failed, or another one, can be left out, and is not yet."""
        step = step or failed.step
        if step not in MAY_BE_LEFT_OUT or step in self.left_out:
            return False
        name = "it" if step == failed.step else f"'{failed.step}'"
        why = LEFT_OUT.format(step=step, failed=name, error=told(failed.error))
        self.left_out[step] = why
        self._tell(why, failed.error)
        return True

    def _help_at(self, node: fx.Node, failed: PassFailedError) -> bool:
        """Whether there is one more remedy at an operator. Where a pass fails in the same way at a second one like it, those of
        the same line of code get it, in all layers; at a third one, all that are like it.
        """
        why = FAILED_AT.format(target=node.target, step=failed.step, error=told(failed.error))
        helps = (self._mark, self._make_unknown) if failed.facts.found_demand is not None else (self._make_unknown, self._mark)
        help_ = next((help_ for help_ in helps if help_(node, why)), None)
        if help_ is None:
            return False
        line, kind = source_line(node), (help_, failed.step, type(failed.error), node.target)
        for other in failed.facts.joint.nodes if self.kinds[kind] else ():
            if other.target == node.target and (self.kinds[kind] > 1 or source_line(other) == line):
                help_(other, why)
        self.kinds[kind] += 1
        self._tell(f"{why}, in {line}" if line else why, failed.error)
        return True

    def _mark(self, node: fx.Node, why: str) -> bool:
        """Let an operator run whole."""
        if node.name in self.whole or is_assertion(node) or is_collective(node) or is_size(node):
            return False
        self.whole[node.name] = why
        return True

    def _make_unknown(self, node: fx.Node, why: str) -> bool:
        """Let no pass know the operator that was traced, in whose place a pass may have written this one."""
        traced = self.traced.get(node.meta.get(ORIGIN, node.name))
        if traced is None or traced.name in self.unknown or traced in self.shown or not _may_be_unknown(traced):
            return False
        self.unknown[traced.name] = why
        return True

    def _tell(self, what: str, error: Exception) -> None:
        self.faults.append(what)
        log.warning(EXACT, what, exc_info=error if log.isEnabledFor(logging.DEBUG) else None)


def _write_untouched(node: fx.Node, why: str) -> None:
    """Write an operator that no pass knows in the place of a traced one."""
    target: Any = node.target
    with node.graph.inserting_before(node):
        made = node.graph.call_function(RestridedOperator(target, is_view(target)), node.args, node.kwargs)
    made.meta = {**node.meta, WHY_WHOLE: why}
    node.replace_all_uses_with(made, propagate_meta=False)
    node.graph.erase_node(node)


def _may_be_unknown(node: fx.Node) -> bool:
    """Whether an operator gives the same where it is called by a function of ours, on operands that lie as when it was traced."""
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return False
    reads_memory = node.target in READS_STRIDES
    return not (reads_memory or is_random(node) or is_collective(node) or is_assertion(node) or is_size(node))


def _shown(joint: JointGraph) -> frozenset[fx.Node]:
    """Views through which somebody asks whose memory it is: who gets a result, or an operator that reads memory as it lies."""
    results = (producer_of(node) for result in filter(is_tensor, joint.outputs) for node in shown_by(result))
    asked = joint.nodes if any(node.target in READS_STRIDES for node in joint.nodes) else results
    return frozenset(node for node in asked if isinstance(node.target, OpOverload) and is_view(node.target))
