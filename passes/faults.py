"""If a pass raises an unexpected exception, run the passes again without the part at which it failed.

The traceback shows which operator the pass was processing: the innermost frame with an operator in a local variable.
The passes restart on a fresh copy of the traced graph, with one more *remedy* each time, until they succeed:

    the operator falls back         it runs on the full sequence, not in a loop; passes after `access_roles` respect that
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
from streamfx.ir.operator_table import Kind, is_kind, returns_view
from streamfx.log import log
from streamfx.node_meta import FALLBACK_REASON, JOINT, ORIGIN, TRACED_NAME
from streamfx.passes.ops.collectives import is_collective
from streamfx.passes.ops.fallback import FallbackError
from streamfx.passes.ops.traits import is_random, producer_of
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
        """Yield operators of the joint graph that the pass was probably processing when it raised.

        These are the nodes in local variables of the traceback's frames, from the innermost frame outwards.
        """
        joint_nodes = {node.name: node for node in self.facts.joint.graph.nodes}
        frames = [frame for frame, _ in traceback.walk_tb(self.error.__traceback__)]
        for value in (value for frame in reversed(frames) for value in frame.f_locals.values()):
            if isinstance(value, fx.Node):  # of the joint graph, or of a host program: then its metadata names the joint node
                joint_node = joint_nodes.get(value.meta.get(TRACED_NAME) or value.meta.get(JOINT, value.name))
                if joint_node is not None and joint_node.op == "call_function":
                    yield producer_of(joint_node)

    def as_strict_error(self) -> NotStreamedError:
        """Return the error for the user if the option `strict` forbids remedies: it names the pass, operator and line."""
        node = next(self.operators(), None)
        at = "" if node is None else f" at {node.target}"
        return NotStreamedError(
            "strict=True requires every stage to stream",
            found=f"the pass '{self.pass_name}' failed{at} ({describe_error(self.error)})",
            where="" if node is None else source_line(node),
            do="drop strict=True: that operator falls back, and the result is exact; or write that line in another way",
        )


def apply_guarded(pass_name: str, facts: Facts, apply: Callable[[Facts], Facts]) -> Facts:
    """Return `apply(facts)`, where `apply` is the method of the pass `pass_name`.

    An unexpected exception becomes a `PassFailedError`. Deliberate errors (`FallbackError`, errors for the user) pass through.
    """
    try:
        return apply(facts)
    except (PassFailedError, FallbackError, StreamFXError):
        raise
    except Exception as error:
        raise PassFailedError(pass_name, facts, error) from error


Remedy: TypeAlias = "Callable[[fx.Node, str], bool]"  # applies to an operator, for a reason; False if it is not possible


class FailureKind(NamedTuple):
    """Failures of one pass by one type of error at operators with one target: they get the same remedy."""

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
        """Apply all remedies so far to a freshly traced graph; return its facts.

        Replace opaque operators in the graph in place, and record fallbacks and the descriptions of remedies in the facts.
        Also note the graph's operators, to which later failures refer by name.
        """
        self.traced = {node.name: node for node in facts.joint.graph.nodes}
        self.observable_views = _observable_views(facts.joint)
        for name, reason in self.opaque.items():
            _replace_by_opaque(self.traced[name], reason)
        if self.opaque:
            facts = replace(facts, joint=joint_graph(facts.joint.graph, len(facts.joint.primals), len(facts.joint.outputs)))
        return replace(facts, fallbacks=dict(self.fallbacks), faults=tuple(self.faults))

    def add_fallback(self, error: FallbackError) -> bool:
        """Make the operator that a pass could not run in a loop fall back: from now on, it runs on the full sequence.

        If it already falls back, make it opaque, so that no pass has rules for it. Return False, and change nothing, if it
        is opaque already, must not be opaque, or is not in the traced graph.
        """
        name = error.operator_name
        if name not in self.fallbacks:
            self.fallbacks[name] = error.reason
            return True
        return name in self.traced and self._make_opaque(self.traced[name], error.reason)

    def add_remedy(self, failed: PassFailedError) -> bool:
        """Add one remedy for an unexpected exception in a pass. Return False if none is left.

        In this order: skip the pass, if that costs little; restrict an operator that it was processing (at most
        `MAX_REMEDIES` times per pass); skip the pass, if it is optional; skip an optional pass that inserts operators.
        """
        if failed.pass_name in SKIPPED_FIRST:
            return self._skip_pass(failed)
        may_restrict_operator = self.remedies_at_operators[failed.pass_name] < MAX_REMEDIES
        if may_restrict_operator and any(self._restrict_operator(node, failed) for node in failed.operators()):
            self.remedies_at_operators[failed.pass_name] += 1
            return True
        return self._skip_pass(failed) or any(self._skip_pass(failed, pass_name) for pass_name in SKIPPED_LAST)

    def _skip_pass(self, failed: PassFailedError, pass_name: str = "") -> bool:
        """Skip the pass `pass_name`, by default the one that failed, from now on, and log a warning.

        Return False, and change nothing, if that pass is not optional, or is already skipped.
        """
        pass_name = pass_name or failed.pass_name
        if pass_name not in OPTIONAL_PASSES or pass_name in self.skipped:
            return False
        failed_name = "it" if pass_name == failed.pass_name else f"'{failed.pass_name}'"
        reason = SKIPPED.format(pass_name=pass_name, failed=failed_name, error=describe_error(failed.error))
        self.skipped[pass_name] = reason
        self._record(reason, failed.error)
        return True

    def _restrict_operator(self, node: fx.Node, failed: PassFailedError) -> bool:
        """Make an operator fall back (run on the full sequence), or opaque to all passes: the next that is possible.

        Before the access analysis, opaque is tried first, because the passes until then do not respect fallbacks.
        Record the remedy and log a warning. Return False if no remedy is left for this operator.
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
        """After repeated failures, apply the remedy that `node` got also to similar operators: layers need not fail one by one.

        A kind of failure is one pass that raises one type of error at operators with one target. Its first failure affects
        `node` only, the second all operators with this target from the same source line, later ones all with this target.
        """
        kind = FailureKind(remedy, failed.pass_name, type(failed.error), node.target)
        line = source_line(node)
        for other in failed.facts.joint.nodes if self.failures_of_kind[kind] else ():
            if other.target == node.target and (self.failures_of_kind[kind] > 1 or source_line(other) == line):
                remedy(other, reason)
        self.failures_of_kind[kind] += 1

    def _make_fallback(self, node: fx.Node, reason: str) -> bool:
        """Make an operator fall back: it runs on the full sequence, not in a loop; `reason` is reported to the user.

        Return False if it already falls back, or is an assertion, a collective or a size.
        """
        if node.name in self.fallbacks or is_assertion(node) or is_collective(node) or is_size(node):
            return False
        self.fallbacks[node.name] = reason
        return True

    def _make_opaque(self, node: fx.Node, reason: str) -> bool:
        """Make an operator opaque in the next attempt: no pass has rules for it, and it runs exactly as traced.

        If a pass wrote `node` (its metadata has `ORIGIN`), the traced operator becomes opaque that it replaces. Return False
        if there is none, it is already opaque, or it must not be opaque (for example a view that users can observe).
        """
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
    """Replace a traced operator, in place, by a `RestridedOperator` that calls it: no pass has rules for that target."""
    target: Any = node.target
    with node.graph.inserting_before(node):
        opaque = node.graph.call_function(RestridedOperator(target, returns_view(target)), node.args, node.kwargs)
    opaque.meta = {**node.meta, FALLBACK_REASON: reason}
    node.replace_all_uses_with(opaque, propagate_meta=False)
    node.graph.erase_node(node)


def _may_be_opaque(node: fx.Node) -> bool:
    """Return whether a `RestridedOperator` may wrap an operator: it copies operands to their traced strides, then calls it.

    It may not wrap an operator that writes to operands, reads memory by strides or draws random numbers, nor collectives,
    assertions and sizes, which the passes must recognize.
    """
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return False
    reads_memory = is_kind(node, Kind.STRIDED)
    return not (reads_memory or is_random(node) or is_collective(node) or is_assertion(node) or is_size(node))


def _observable_views(joint: JointGraph) -> frozenset[fx.Node]:
    """Return the view operators that must stay views, because a user or an operator could observe that they alias memory.

    These are the views of which the graph returns a result, or all views if an operator such as `as_strided` reads memory.
    """
    results = (producer_of(node) for result in filter(is_tensor, joint.outputs) for node in view_chain(result))
    candidates = joint.nodes if any(is_kind(node, Kind.STRIDED) for node in joint.nodes) else results
    return frozenset(node for node in candidates if isinstance(node.target, OpOverload) and returns_view(node.target))
