"""Find the interval of keys that the query positions of a chunk can see.

The interval is proven: every value with rows and keys is described by facts per interval of delta = key position -
query position (see `ir/piecewise.py`), derived from index arithmetic and propagated through masks, scores,
probabilities and their cotangents. A reduction over keys may be restricted to an interval of delta if all values
outside it are the identity of the reduction (minus infinity before a softmax, zero before a sum). All operators of one
attention share one span, the smallest that is valid for all of them.

    where(col <= row, scores, -inf)   ->   -inf for delta > 0   ->   probabilities 0 there   ->   keys [0, e)

A `Span` (low, high) is the keys [s + low, e + high) of the chunk [s, e); None is unbounded. A *fact* is a `Range` of numbers,
or a `Slope` of delta; `Pieces` has a fact per interval of delta. `Masks.of(value)` returns a value's pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from streamfx.ir.facts import AccessFacts, AxisFacts, Facts, Role, SpanFacts, StorageClass
from streamfx.ir.joint import JointGraph, bound_arguments, connected_components, is_tensor, tensor_operands
from streamfx.ir.piecewise import DeltaInterval, Fact, Pieces
from streamfx.ir.ranges import Range, constant
from streamfx.ir.signature import Signature, Window
from streamfx.ir.span import Span
from streamfx.passes.analysis.fused_scores import finite_hides
from streamfx.passes.analysis.mask_facts import Masks
from streamfx.passes.ops.linearity import is_linear
from streamfx.passes.ops.traits import producer_of

aten = torch.ops.aten


@dataclass(frozen=True)
class KeySpans:
    """The pass that finds which keys the query positions of a chunk can see."""

    name: ClassVar[str] = "key_spans"

    def apply(self, facts: Facts) -> Facts:
        """Return the facts with key spans. Masks of fused attention that hide exactly the keys outside their span are dropped."""
        key_spans = _find_spans(facts.joint, facts.axes, facts.access)
        signatures = dict(facts.axes.signatures)
        for node in key_spans.exact_masks:
            signatures[node] = _without_mask(node, signatures[node])
        return replace(facts, found_axes=replace(facts.axes, signatures=signatures), found_key_spans=key_spans)


def _find_spans(joint: JointGraph, axes: AxisFacts, access: AccessFacts) -> SpanFacts:
    """Return the key span of each operator on query-by-key values that runs in loops; connected operators share one span.

    Also return which masks equal their span, and which scores are so small that a mask's finite fill hides a key.
    """
    masks = Masks(joint, axes, access)
    pairs = [node for node in joint.nodes if Role.KEYS in access.roles.get(node, {}).values() and access.is_in_loop(node)]
    recomputed_per_consumer = _recomputed_per_consumer(pairs, axes, access)  # masks and the like: valid for any span
    spans: dict[fx.Node, Span] = {}
    span_kinds: dict[fx.Node, str] = {}
    exact_masks: set[fx.Node] = set()
    ordinary_scores: set[fx.Node] = set()
    for group in _groups([node for node in pairs if node not in recomputed_per_consumer], axes):
        interval_of_each = (_needed_interval(node, masks, axes, access) for node in group)
        intervals = [interval for interval in interval_of_each if interval is not None]
        if any(_leaves_loops(node, joint, access) for node in group):
            intervals.append(DeltaInterval(None, None))
        span = _smallest_span(intervals)
        for node in group:
            spans[node] = span
            if node not in axes.static:
                span_kinds[node] = span_kind(span)
            signature = axes.signatures[node]
            if signature.keys and _mask_equals_span(node, masks, span):
                exact_masks.add(node)
            if signature.keys and finite_hides(node, masks.values):
                ordinary_scores.add(node)
    return SpanFacts(spans, span_kinds, recomputed_per_consumer, frozenset(exact_masks), frozenset(ordinary_scores))


def _without_mask(node: fx.Node, signature: Signature) -> Signature:
    """Remove the mask of a fused attention from the call, in place; return the signature without the mask, its last operand."""
    if bound_arguments(node).get("attn_mask") is None:
        return signature
    node.update_kwarg("attn_mask", None)
    return replace(signature, operands=signature.operands[:-1])


def span_kind(span: Span) -> str:
    """Return the kind of a span, as reports print it: "causal", "window(8)", "masked" (all keys) or "band(...)"."""
    if span.high == 0:
        return "causal" if span.low is None else f"window({1 - span.low})"
    return "masked" if span.low is None and span.high is None else f"band({span})"


def _leaves_loops(node: fx.Node, joint: JointGraph, access: AccessFacts) -> bool:
    """Return whether a query-by-key result of an operator leaves its loop: the graph returns it, or it is read outside loops."""
    if StorageClass.PAIR not in access.storage_classes[node]:
        return False
    values = [node] if is_tensor(node) else [user for user in node.users if producer_of(user) is node]
    if any(value is output for value in values for output in (*joint.outputs, *joint.gradients)):
        return True
    return any(user in access.storage_classes and not access.is_in_loop(user) for value in values for user in value.users)


def _recomputed_per_consumer(pairs: list[fx.Node], axes: AxisFacts, access: AccessFacts) -> frozenset[fx.Node]:
    """Return the operators with keys (of `pairs`) that need no span: static ones whose result at a key needs that key alone.

    Masks, biases and decays are cheap and have the same result for any span, so each consumer recomputes them for its keys.
    A softmax or a prefix sum of positions needs a span, and so do its consumers.
    """
    recomputed_per_consumer: set[fx.Node] = set()
    others: set[fx.Node] = set()
    for node in pairs:
        producers = {producer_of(source) for source in node.all_input_nodes if _carries_pair(source, axes)}
        if node in axes.static and others.isdisjoint(producers) and _is_per_key(node, axes, access):
            recomputed_per_consumer |= {node, *(user for user in node.users if producer_of(user) is node)}
        else:
            others.add(node)
    return frozenset(recomputed_per_consumer)


def _is_per_key(node: fx.Node, axes: AxisFacts, access: AccessFacts) -> bool:
    """Return whether an operator's result at each key depends on that key alone: keys are not summed, scanned or shifted."""
    signature, roles = axes.signatures[node], access.roles[node]
    keys = {label for label, role in roles.items() if role is Role.KEYS}  # axis labels
    not_sliced = {label for label, index in signature.index.items() if not (isinstance(index, Window) and index.reach == 0)}
    mixed = signature.keys.union(not_sliced, *map(signature.contracted_labels, range(len(signature.results))))
    return keys.isdisjoint(mixed)


def _groups(pairs: list[fx.Node], axes: AxisFacts) -> list[list[fx.Node]]:
    """Return the connected components of `pairs`, operators that pass values with rows and keys to each other."""
    members = set(pairs)
    edges = ((producer_of(source), node) for node in pairs for source in node.all_input_nodes if _carries_pair(source, axes))
    return connected_components(pairs, (link for link in edges if link[0] in members))


def _carries_pair(value: fx.Node, axes: AxisFacts) -> bool:
    """Return whether a value has both query positions and key positions."""
    return is_tensor(value) and len(axes.sequence_dims(axes.shapes[value])) == 2


def _smallest_span(intervals: list[DeltaInterval]) -> Span:
    """Return the smallest span that contains all intervals of delta = key - query position, and delta = 0.

    delta = 0 gives each chunk keys. Without intervals, the span is all keys.
    """
    lows, highs = [item.low for item in intervals], [item.high for item in intervals]
    low = None if not lows or None in lows else min(0, *lows)  # type: ignore[type-var]
    high = None if not highs or None in highs else max(0, *highs)  # type: ignore[type-var]
    return Span(low, high)


def _needed_interval(node: fx.Node, masks: Masks, axes: AxisFacts, access: AccessFacts) -> DeltaInterval | None:
    """Return the interval of delta that a reduction over keys (or queries) needs: outside it, all operands are its identity.

    `DeltaInterval(None, None)` is all keys. None if the operator does not reduce query-by-key values.
    """
    signature, roles = axes.signatures[node], access.roles[node]
    if signature.keys:
        return _needed_by_fused_attention(node, masks)
    contracted = {roles[label] for label in signature.contracted_labels() if label in roles}
    normalized = {roles[label] for label in signature.full_labels if label in roles}
    if Role.KEYS in normalized:
        return _needed_by_softmax(node, masks)
    if Role.KEYS in contracted or Role.ROWS in contracted:
        if signature.combine not in ("sum", "mean"):
            return DeltaInterval(None, None)
        intervals = [
            masks.of(operand).support(_is_zero)
            for operand in tensor_operands(node)
            if len(axes.sequence_dims(axes.shapes[operand])) == 2 and is_linear(node, [operand])
        ]
        # each interval suffices alone: one operand that is zero makes the product zero
        return max(intervals, key=_finite_ends) if intervals else DeltaInterval(None, None)
    return None


def _finite_ends(interval: DeltaInterval) -> tuple[bool, bool]:
    """Return a sort key: intervals of delta with a finite high end come last, and of these, ones with a finite low end."""
    return interval.high is not None, interval.low is not None


def _is_zero(fact: Fact) -> bool:
    """Return whether a fact proves zero, or NaN: zero adds nothing to a sum, and NaN makes eager's sum NaN as well."""
    return isinstance(fact, Range) and fact.is_zero


def _needed_by_softmax(node: fx.Node, masks: Masks) -> DeltaInterval:
    """Return the interval of delta in which the result of a softmax is nonzero; for its backward, the forward's interval.

    For `logsumexp` and `amax`, the interval of scores that are not hidden (such as -inf); for other operators, all keys.
    """
    if node.target in (aten._softmax.default, aten._safe_softmax.default):
        return masks.of(node).support(_is_zero)
    if node.target is aten._softmax_backward_data.default:
        return masks.of(tensor_operands(node)[1]).support(_is_zero)
    if node.target in (aten.logsumexp.default, aten.amax.default):
        scores = masks.of(tensor_operands(node)[0])
        return scores.support(masks.hidden_test(node, scores))
    return DeltaInterval(None, None)


def _needed_by_fused_attention(node: fx.Node, masks: Masks) -> DeltaInterval:
    """Return the interval of delta in which a fused attention's mask and causal flag hide no keys; all keys if unknown."""
    bias = masks.fused_bias(node)
    if bias is None:
        return DeltaInterval(None, None)
    return bias.support(masks.hidden_test(node, bias))


def _mask_equals_span(node: fx.Node, masks: Masks, span: Span) -> bool:
    """Return whether a fused attention's mask hides exactly the keys outside the span, and adds 0 inside it.

    Then the mask can be dropped: a kernel's causal flag or window suffices.
    """
    bias = masks.fused_bias(node)
    if bias is None or masks.index_axes(node) is None:
        return False
    hidden = masks.hidden_test(node, bias)
    is_zero_or_hidden = all(hidden(fact) or fact == constant(0) for fact in bias.facts)
    return is_zero_or_hidden and bias.support(hidden) == DeltaInterval(span.low, span.high) and _is_contiguous(bias, hidden)


def _is_contiguous(bias: Pieces, hidden: Callable[[Fact], bool]) -> bool:
    """Return whether the visible intervals of delta in `bias` are contiguous: none between two of them is hidden."""
    visible = [not hidden(fact) for fact in bias.facts]
    first = visible.index(True) if True in visible else 0
    last = len(visible) - 1 - visible[::-1].index(True) if True in visible else 0
    return all(visible[first : last + 1])
