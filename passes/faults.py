"""If a pass raises an unexpected exception, plan the graph without the part at which it failed.

The traceback tells which operator the pass was processing: the innermost frame with an operator in a local variable.
The passes restart on a fresh copy of the traced graph, with one more remedy each time, until they succeed:

    the operator is not chunked     as if a pass had raised `FallbackError`; passes after `access_roles` respect that
    the operator becomes opaque     its target is a `RestridedOperator`, which has no axis rules and no rewrite rules
    the pass is skipped             if it only makes steps smaller or faster
    an earlier pass is skipped      if nothing else helps: it may have written an operator that corresponds to no traced one
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from streamfx.errors import NotStreamedError, StreamFXError, describe_error
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

MOST_REMEDIES = 8  # limit of operator remedies per pass
SKIPPED_FIRST = frozenset(
    {"loss_gradient", "buckets", "hoist_masks", "compile_bodies"}
)  # skip these passes first: an operator that is not chunked costs more
REWRITES = frozenset({"split_concat_kv", "compressed_kv", "decompose_on_sequence", "split_shared", "merge_all_reduces"})
WRITE_OPERATORS = ("loss_gradient", *sorted(REWRITES), "recurrences")  # skipped if nothing else helps, in this order
MAY_BE_LEFT_OUT = SKIPPED_FIRST | REWRITES | {"recurrences"}
FAILED_AT = "{target} runs whole, as the pass '{step}' failed at it ({error})"
LEFT_OUT = "the pass '{step}' is left out, as {failed} failed ({error})"
EXACT = "%s. The result is exact; strict=True raises an error instead"


class PassFailedError(Exception):
    """A pass raised an exception that it does not raise on purpose."""

    def __init__(self, step: str, facts: Facts, error: Exception) -> None:
        super().__init__(f"{step}: {describe_error(error)}")
        self.step, self.facts, self.error = step, facts, error

    def operators(self) -> Iterator[fx.Node]:
        """Yield the operators that the pass was processing, from the innermost frame outwards."""
        by_name = {node.name: node for node in self.facts.joint.graph.nodes}
        frames = [frame for frame, _ in traceback.walk_tb(self.error.__traceback__)]
        for value in (value for frame in reversed(frames) for value in frame.f_locals.values()):
            if isinstance(value, fx.Node):
                traced = by_name.get(value.meta.get(TRACED) or value.meta.get(JOINT, value.name))  # it may be a program's node
                if traced is not None and traced.op == "call_function":
                    yield producer_of(traced)

    def refused(self) -> NotStreamedError:
        """Return the error to raise instead if `strict` requires every stage to be chunked."""
        node = next(self.operators(), None)
        at = "" if node is None else f" at {node.target}"
        return NotStreamedError(
            "strict=True requires every stage to stream",
            found=f"the pass '{self.step}' failed{at} ({describe_error(self.error)})",
            where="" if node is None else source_line(node),
            do="drop strict=True: what it failed at runs whole, and the result is exact; or write that line in another way",
        )


def guarded(step: str, facts: Facts, apply: Callable[[Facts], Facts]) -> Facts:
    """Apply a pass to facts; any unexpected exception becomes `PassFailedError`."""
    try:
        return apply(facts)
    except (PassFailedError, FallbackError, StreamFXError):
        raise
    except Exception as error:
        raise PassFailedError(step, facts, error) from error


@dataclass
class Remedies:
    """The restrictions under which a graph is planned, each with its reason.

    Operators may be excluded from chunking (`whole`) or made opaque to all passes (`unknown`), both by name, and
    passes may be skipped (`left_out`). `traced` holds the operators of the traced graph by name, `shown` the views
    through which aliasing is observable.
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
        """Apply the remedies to a freshly traced graph."""
        self.traced = {node.name: node for node in facts.joint.graph.nodes}
        self.shown = _observable_views(facts.joint)
        for name, why in self.unknown.items():
            _replace_by_opaque(self.traced[name], why)
        if self.unknown:
            facts = replace(facts, joint=joint_graph(facts.joint.graph, len(facts.joint.primals), len(facts.joint.outputs)))
        return replace(facts, fallbacks=dict(self.whole), faults=tuple(self.faults))

    def help_with_refusal(self, refused: FallbackError) -> bool:
        """Return whether a remedy exists for a pass that refuses to chunk an operator."""
        if refused.name not in self.whole:
            self.whole[refused.name] = refused.why
            return True
        return refused.name in self.traced and self._make_opaque(self.traced[refused.name], refused.why)

    def add_remedy(self, failed: PassFailedError) -> bool:
        """Return whether a remedy exists for an unexpected exception in a pass."""
        if failed.step in SKIPPED_FIRST:
            return self._skip_pass(failed)
        if self.tried[failed.step] < MOST_REMEDIES and any(self._remedy_at(node, failed) for node in failed.operators()):
            self.tried[failed.step] += 1
            return True
        return self._skip_pass(failed) or any(self._skip_pass(failed, step) for step in WRITE_OPERATORS)

    def _skip_pass(self, failed: PassFailedError, step: str = "") -> bool:
        """Skip the pass that failed, or another one. Return False if that is not allowed or was already done."""
        step = step or failed.step
        if step not in MAY_BE_LEFT_OUT or step in self.left_out:
            return False
        name = "it" if step == failed.step else f"'{failed.step}'"
        why = LEFT_OUT.format(step=step, failed=name, error=describe_error(failed.error))
        self.left_out[step] = why
        self._record(why, failed.error)
        return True

    def _remedy_at(self, node: fx.Node, failed: PassFailedError) -> bool:
        """Try one more remedy at an operator; return whether there is one.

        If a pass fails in the same way at a second operator of the kind, the remedy applies to all operators of that
        kind from the same source line, in all layers; at a third one, to all operators of that kind.
        """
        why = FAILED_AT.format(target=node.target, step=failed.step, error=describe_error(failed.error))
        helps = (
            (self._exclude_from_chunking, self._make_opaque)
            if failed.facts.found_access is not None
            else (self._make_opaque, self._exclude_from_chunking)
        )
        help_ = next((help_ for help_ in helps if help_(node, why)), None)
        if help_ is None:
            return False
        line, kind = source_line(node), (help_, failed.step, type(failed.error), node.target)
        for other in failed.facts.joint.nodes if self.kinds[kind] else ():
            if other.target == node.target and (self.kinds[kind] > 1 or source_line(other) == line):
                help_(other, why)
        self.kinds[kind] += 1
        self._record(f"{why}, in {line}" if line else why, failed.error)
        return True

    def _exclude_from_chunking(self, node: fx.Node, why: str) -> bool:
        """Mark an operator as not chunked."""
        if node.name in self.whole or is_assertion(node) or is_collective(node) or is_size(node):
            return False
        self.whole[node.name] = why
        return True

    def _make_opaque(self, node: fx.Node, why: str) -> bool:
        """Make the traced operator opaque from which this one stems; a pass may have replaced it."""
        traced = self.traced.get(node.meta.get(ORIGIN, node.name))
        if traced is None or traced.name in self.unknown or traced in self.shown or not _may_be_opaque(traced):
            return False
        self.unknown[traced.name] = why
        return True

    def _record(self, what: str, error: Exception) -> None:
        self.faults.append(what)
        log.warning(EXACT, what, exc_info=error if log.isEnabledFor(logging.DEBUG) else None)


def _replace_by_opaque(node: fx.Node, why: str) -> None:
    """Replace a traced operator by an opaque one, which no pass has rules for."""
    target: Any = node.target
    with node.graph.inserting_before(node):
        opaque = node.graph.call_function(RestridedOperator(target, is_view(target)), node.args, node.kwargs)
    opaque.meta = {**node.meta, WHY_WHOLE: why}
    node.replace_all_uses_with(opaque, propagate_meta=False)
    node.graph.erase_node(node)


def _may_be_opaque(node: fx.Node) -> bool:
    """Return whether one of our functions may call an operator, on operands with the traced strides, with the same
    result.
    """
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return False
    reads_memory = node.target in READS_STRIDES
    return not (reads_memory or is_random(node) or is_collective(node) or is_assertion(node) or is_size(node))


def _observable_views(joint: JointGraph) -> frozenset[fx.Node]:
    """Return views through which aliasing is observable: results of the graph, and operands of operators that read
    strides.
    """
    results = (producer_of(node) for result in filter(is_tensor, joint.outputs) for node in shown_by(result))
    asked = joint.nodes if any(node.target in READS_STRIDES for node in joint.nodes) else results
    return frozenset(node for node in asked if isinstance(node.target, OpOverload) and is_view(node.target))
