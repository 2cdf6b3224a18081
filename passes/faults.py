"""If a pass raises an unexpected exception, run the passes again without the part at which it failed.

The traceback shows which operator the pass was processing: the innermost frame with an operator in a local variable.
The passes restart on a fresh copy of the traced graph, with one more remedy each time, until they succeed:

    the operator falls back         as if a pass had raised `FallbackError`; passes after `access_roles` respect that
    the operator becomes opaque     its target is a `RestridedOperator`, which has no axis rules and no rewrite rules
    the pass is skipped             if it only reduces the memory or time of a step
    an earlier pass is skipped      if nothing else helps: it may have inserted an operator that the traced graph lacks
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from torch import fx

from streamfx.errors import NotStreamedError, StreamFXError, describe_error
from streamfx.ir.facts import Facts
from streamfx.ir.joint import JointGraph, is_assertion, is_size, is_tensor, joint_graph
from streamfx.log import log
from streamfx.node_meta import FALLBACK_REASON, JOINT, ORIGIN, TRACED_NAME
from streamfx.passes.ops.aliasing import is_view
from streamfx.passes.ops.collectives import is_collective
from streamfx.passes.ops.fallback import FallbackError
from streamfx.passes.ops.traits import READS_STRIDES, is_random, producer_of
from streamfx.passes.rewrite.views.strided_access import view_chain
from streamfx.runtime.restride import RestridedOperator
from streamfx.torch_private import OpOverload
from streamfx.torch_private.lines import source_line

MAX_REMEDIES = 8  # per pass, at operators
SKIPPED_FIRST = frozenset(
    {"loss_gradient", "buckets", "hoist_masks", "compile_bodies"}
)  # these passes are skipped before any operator falls back, which costs more
REWRITES = ("split_concat_kv", "compressed_kv", "split_shared", "decompose_on_sequence", "merge_all_reduces")
SKIPPED_LAST = ("loss_gradient", *REWRITES, "recurrences")  # passes that insert operators, in this order
OPTIONAL_PASSES = SKIPPED_FIRST.union(SKIPPED_LAST)
FAILED_AT = "{target} falls back, because the pass '{pass_name}' failed at it ({error})"
SKIPPED = "the pass '{pass_name}' is skipped, because {failed} failed ({error})"
EXACT = "%s. The result is exact; strict=True raises an error instead"


class PassFailedError(Exception):
    """A pass raised an unexpected exception, `error`, when it ran on `facts`."""

    def __init__(self, pass_name: str, facts: Facts, error: Exception) -> None:
        super().__init__(f"{pass_name}: {describe_error(error)}")
        self.pass_name, self.facts, self.error = pass_name, facts, error

    def operators(self) -> Iterator[fx.Node]:
        """Yield the operators that the pass was processing, from the innermost frame outwards."""
        by_name = {node.name: node for node in self.facts.joint.graph.nodes}
        frames = [frame for frame, _ in traceback.walk_tb(self.error.__traceback__)]
        for value in (value for frame in reversed(frames) for value in frame.f_locals.values()):
            if isinstance(value, fx.Node):  # of the joint graph, or of a program: then its metadata names the joint node
                traced = by_name.get(value.meta.get(TRACED_NAME) or value.meta.get(JOINT, value.name))
                if traced is not None and traced.op == "call_function":
                    yield producer_of(traced)

    def as_strict_error(self) -> NotStreamedError:
        """Return the error to raise instead of a remedy if `strict` requires every stage to stream."""
        node = next(self.operators(), None)
        at = "" if node is None else f" at {node.target}"
        return NotStreamedError(
            "strict=True requires every stage to stream",
            found=f"the pass '{self.pass_name}' failed{at} ({describe_error(self.error)})",
            where="" if node is None else source_line(node),
            do="drop strict=True: that operator falls back, and the result is exact; or write that line in another way",
        )


def apply_guarded(pass_name: str, facts: Facts, apply: Callable[[Facts], Facts]) -> Facts:
    """Apply a pass to facts; any unexpected exception becomes `PassFailedError`."""
    try:
        return apply(facts)
    except (PassFailedError, FallbackError, StreamFXError):
        raise
    except Exception as error:
        raise PassFailedError(pass_name, facts, error) from error


Remedy: TypeAlias = "Callable[[fx.Node, str], bool]"  # applies to an operator, for a reason; False if it is not possible


class FailureKind(NamedTuple):
    """Failures at operators that differ in name only: they get the same remedy."""

    remedy: Remedy
    pass_name: str
    error_type: type[Exception]
    target: Any


@dataclass
class Remedies:
    """The restrictions under which the passes run, each with its reason, and methods that add one after a failure.

    `fallbacks`, `opaque`: the operators that fall back, or are opaque to all passes, by name.
    `skipped`: the passes that do not run, by name.
    `faults`: a description of each remedy.
    `traced`: the operators of the traced graph, by name.
    `observable_views`: the views of the traced graph that must stay views, because aliasing is observable through them.
    `remedies_at_operators`: how many remedies at operators each pass has caused.
    `failures_of_kind`: how many failures of each kind have got a remedy.
    """

    fallbacks: dict[str, str] = field(default_factory=dict)
    opaque: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    traced: Mapping[str, fx.Node] = field(default_factory=dict)
    observable_views: frozenset[fx.Node] = frozenset()
    remedies_at_operators: Counter[str] = field(default_factory=Counter)
    failures_of_kind: Counter[FailureKind] = field(default_factory=Counter)

    def apply_to(self, facts: Facts) -> Facts:
        """Apply the restrictions to a freshly traced graph: make operators opaque in place, and record the fallbacks."""
        self.traced = {node.name: node for node in facts.joint.graph.nodes}
        self.observable_views = _observable_views(facts.joint)
        for name, reason in self.opaque.items():
            _replace_by_opaque(self.traced[name], reason)
        if self.opaque:
            facts = replace(facts, joint=joint_graph(facts.joint.graph, len(facts.joint.primals), len(facts.joint.outputs)))
        return replace(facts, fallbacks=dict(self.fallbacks), faults=tuple(self.faults))

    def add_fallback(self, error: FallbackError) -> bool:
        """Let an operator fall back that a pass cannot run in a loop, or make it opaque if it already falls back.

        Return False if neither is possible.
        """
        if error.name not in self.fallbacks:
            self.fallbacks[error.name] = error.why
            return True
        return error.name in self.traced and self._make_opaque(self.traced[error.name], error.why)

    def add_remedy(self, failed: PassFailedError) -> bool:
        """Add a remedy for an unexpected exception in a pass. Return False if none is left."""
        if failed.pass_name in SKIPPED_FIRST:
            return self._skip_pass(failed)
        may_add_remedy = self.remedies_at_operators[failed.pass_name] < MAX_REMEDIES
        if may_add_remedy and any(self._apply_remedy(node, failed) for node in failed.operators()):
            self.remedies_at_operators[failed.pass_name] += 1
            return True
        return self._skip_pass(failed) or any(self._skip_pass(failed, pass_name) for pass_name in SKIPPED_LAST)

    def _skip_pass(self, failed: PassFailedError, pass_name: str = "") -> bool:
        """Skip the pass that failed, or another one. Return False if it is not optional, or already skipped."""
        pass_name = pass_name or failed.pass_name
        if pass_name not in OPTIONAL_PASSES or pass_name in self.skipped:
            return False
        name = "it" if pass_name == failed.pass_name else f"'{failed.pass_name}'"
        reason = SKIPPED.format(pass_name=pass_name, failed=name, error=describe_error(failed.error))
        self.skipped[pass_name] = reason
        self._record(reason, failed.error)
        return True

    def _apply_remedy(self, node: fx.Node, failed: PassFailedError) -> bool:
        """Apply the next remedy that is possible for this operator: fall back, or become opaque. Return False if none is left.

        Before the access analysis, opaque is tried first, because the passes until then do not respect fallbacks.
        """
        reason = FAILED_AT.format(target=node.target, pass_name=failed.pass_name, error=describe_error(failed.error))
        remedies: tuple[Remedy, Remedy] = (self._make_opaque, self._make_fallback)
        if failed.facts.found_access is not None:
            remedies = (self._make_fallback, self._make_opaque)
        remedy = next((remedy for remedy in remedies if remedy(node, reason)), None)
        if remedy is None:
            return False
        self._extend_to_similar(node, failed, remedy, reason)
        line = source_line(node)
        self._record(f"{reason}, in {line}" if line else reason, failed.error)
        return True

    def _extend_to_similar(self, node: fx.Node, failed: PassFailedError, remedy: Remedy, reason: str) -> None:
        """Apply a remedy also to similar operators, so that layers do not fail one by one.

        The first failure of a kind affects this operator only. The second affects all operators of its type from the same
        source line, the third all operators of its type.
        """
        kind, line = FailureKind(remedy, failed.pass_name, type(failed.error), node.target), source_line(node)
        for other in failed.facts.joint.nodes if self.failures_of_kind[kind] else ():
            if other.target == node.target and (self.failures_of_kind[kind] > 1 or source_line(other) == line):
                remedy(other, reason)
        self.failures_of_kind[kind] += 1

    def _make_fallback(self, node: fx.Node, reason: str) -> bool:
        """Let an operator fall back. Return False if it already does, or is an assertion, a collective or a size."""
        if node.name in self.fallbacks or is_assertion(node) or is_collective(node) or is_size(node):
            return False
        self.fallbacks[node.name] = reason
        return True

    def _make_opaque(self, node: fx.Node, reason: str) -> bool:
        """Make the traced operator opaque from which a pass derived this one. Return False if that is not possible."""
        traced = self.traced.get(node.meta.get(ORIGIN, node.name))
        if traced is None or traced.name in self.opaque or traced in self.observable_views or not _may_be_opaque(traced):
            return False
        self.opaque[traced.name] = reason
        return True

    def _record(self, description: str, error: Exception) -> None:
        """Record a remedy for reports, and log a warning; with its traceback if the log level is DEBUG."""
        self.faults.append(description)
        log.warning(EXACT, description, exc_info=error if log.isEnabledFor(logging.DEBUG) else None)


def _replace_by_opaque(node: fx.Node, reason: str) -> None:
    """Replace a traced operator, in place, by an opaque one: no pass has rules for it."""
    target: Any = node.target
    with node.graph.inserting_before(node):
        opaque = node.graph.call_function(RestridedOperator(target, is_view(target)), node.args, node.kwargs)
    opaque.meta = {**node.meta, FALLBACK_REASON: reason}
    node.replace_all_uses_with(opaque, propagate_meta=False)
    node.graph.erase_node(node)


def _may_be_opaque(node: fx.Node) -> bool:
    """Return whether a `RestridedOperator` may call an operator, with the same result: it restores the operands' strides."""
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return False
    reads_memory = node.target in READS_STRIDES
    return not (reads_memory or is_random(node) or is_collective(node) or is_assertion(node) or is_size(node))


def _observable_views(joint: JointGraph) -> frozenset[fx.Node]:
    """Return the views through which aliasing is observable.

    These are views that the graph returns, or all views if an operator reads strides.
    """
    results = (producer_of(node) for result in filter(is_tensor, joint.outputs) for node in view_chain(result))
    candidates = joint.nodes if any(node.target in READS_STRIDES for node in joint.nodes) else results
    return frozenset(node for node in candidates if isinstance(node.target, OpOverload) and is_view(node.target))
