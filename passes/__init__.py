"""The compiler on one screen: passes in order, each a function from facts to facts."""

if __name__ != "streamfx.passes":
    raise ImportError(f"this folder is the package streamfx.passes, not {__name__!r}: write `import streamfx.passes`")

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from streamfx.errors import OverBudgetError
from streamfx.ir.facts import Facts
from streamfx.options import Options
from streamfx.passes.analysis.access_roles import AccessRoles
from streamfx.passes.analysis.axes import Axes
from streamfx.passes.analysis.diagonal_visible import own_keys
from streamfx.passes.analysis.key_spans import KeySpans
from streamfx.passes.faults import PassFailedError, Remedies, guarded
from streamfx.passes.lowering import lowerings as _emitters  # noqa: F401  (fills the table of emitters)
from streamfx.passes.lowering import running_lowerings as _running  # noqa: F401  (so does this)
from streamfx.passes.lowering.buckets import Buckets
from streamfx.passes.lowering.build_program import BuildProgram
from streamfx.passes.lowering.compile_bodies import CompileBodies
from streamfx.passes.lowering.hoist_masks import Visibility
from streamfx.passes.lowering.reinsert_collectives import ReinsertCollectives
from streamfx.passes.ops.fallback import FallbackError
from streamfx.passes.partition.budget_search import BudgetSearch
from streamfx.passes.partition.chunk_plan import Plan
from streamfx.passes.partition.loss_gradient import LossGradient
from streamfx.passes.partition.stages import StagesPass
from streamfx.passes.rewrite.attention.compressed_kv import KeysInBlocks
from streamfx.passes.rewrite.attention.split_concat_kv import JoinedKeys
from streamfx.passes.rewrite.canonicalize import Canonicalize
from streamfx.passes.rewrite.collectives.reduced_products import SumsOverRanks
from streamfx.passes.rewrite.collectives.unshard import Unshard
from streamfx.passes.rewrite.views.decompose_on_sequence import SumsAlongSequence
from streamfx.passes.scan.detection import Recurrences
from streamfx.passes.scan.split_shared import OwnTables
from streamfx.passes.scan.truncated_bptt import Truncations
from streamfx.passes.verifier import Verifier


class Pass(Protocol):
    """A question about the graph, and its answer."""

    @property
    def name(self) -> str: ...

    def apply(self, facts: Facts) -> Facts: ...


@dataclass(frozen=True)
class Fixpoint:
    """An analysis, and rewrites that it allows, in turn until nothing is left to rewrite."""

    analysis: Pass
    rewrites: tuple[Pass, ...]

    @property
    def name(self) -> str:
        return self.analysis.name

    def apply(self, facts: Facts) -> Facts:
        facts = self.analysis.apply(facts)
        while (rewritten := self._rewritten(facts)) is not facts:
            facts = guarded(self.name, rewritten, self.analysis.apply)
        return facts

    def _rewritten(self, facts: Facts) -> Facts:
        made = (guarded(rewrite.name, facts, rewrite.apply) for rewrite in self.rewrites)
        return next((rewritten for rewritten in made if rewritten is not facts), facts)

    def without(self, left_out: Container[str]) -> Pass:
        return replace(self, rewrites=tuple(rewrite for rewrite in self.rewrites if rewrite.name not in left_out))


def analyses(options: Options) -> tuple[Pass, ...]:
    """The passes that find out about the graph, and write it in fewer operators; nothing is cut yet."""
    return (
        Unshard(),  # which collectives are on weights alone? What follows sees the model without shards
        Canonicalize(),  # what is this, in the fewest operators?
        Recurrences(),  # which unrolled loops carry a state from row to row?
        Fixpoint(
            Axes(), (JoinedKeys(own_keys), KeysInBlocks(), SumsAlongSequence(), OwnTables(), SumsOverRanks())
        ),  # which dimension of which value is the sequence?
        AccessRoles(),  # which rows of its operands does each operator need?
        Truncations(options),  # which gradients of states reach back few rows alone, where that was asked for?
        KeySpans(),  # which keys can a chunk's rows see?
    )


def pipeline(options: Options) -> tuple[Pass, ...]:
    """All passes, in order."""
    put_back = ReinsertCollectives(options)
    return (
        *analyses(options),
        StagesPass(),  # where is it cheapest to cut?
        LossGradient(),  # can the loss stage find its gradient along with the loss? (the one rewrite that needs the stages)
        Plan(options),  # how large is a chunk, what is kept?
        BuildProgram(),  # what runs instead of the joint graph?
        put_back,  # where do collectives on weights run?
        BudgetSearch(
            options, lambda facts: put_back.apply(BuildProgram().apply(facts))
        ),  # which plan is the fastest within the memory budget?
        Buckets(),  # which collectives run as one?
        Visibility(),  # which masks are looked at once per step?
        CompileBodies(options),  # who runs a loop's body?
    )


def run_pipeline(
    capture: Callable[[], Facts],
    options: Options,
    after: Callable[[Pass, Facts], None] | None = None,
    analysed: Callable[[], Facts] | None = None,
) -> Facts:
    """Run all passes on a graph of their own, which `capture` makes; `after` sees each pass's product. Without a sequence axis
    nothing is rewritten. For somebody who runs nothing, and knows what analyses find, `analysed` makes a graph with that: passes
    begin there, and end before bodies are lowered.

    Where a pass cannot run an operator in a loop, or fails at it, that operator is to run whole, and all passes run once more.
    """
    remedies = Remedies()
    while True:
        try:
            if analysed is not None:
                return _within_budget(analysed, options, after)
            return _within_budget(lambda: remedies.applied(capture()), options, after, remedies.left_out)
        except (FallbackError, PassFailedError) as found:
            if analysed is not None:
                analysed = None
            elif isinstance(found, FallbackError):
                if not remedies.help_with_refusal(found):
                    raise
            elif options.strict:
                raise found.refused() from found.error
            elif not remedies.help_with(found):
                raise found.error from None


def _within_budget(
    capture: Callable[[], Facts],
    options: Options,
    after: Callable[[Pass, Facts], None] | None,
    left_out: Container[str] = (),
) -> Facts:
    """Where no plan stays within the memory budget with a last stage of its own for the head, those without it are tried."""
    steps = [_without(step, left_out) for step in pipeline(options) if step.name not in left_out]
    if options.memory_budget is None:
        return _run(capture(), steps, options, after)
    try:
        return _run(capture(), steps, options, after)
    except OverBudgetError as error:
        try:
            without = [LossGradient(False) if isinstance(step, LossGradient) else step for step in steps]
            return _run(capture(), without, options, after)
        except OverBudgetError as other:
            raise min(error, other, key=lambda item: item.smallest) from None


def _without(step: Pass, left_out: Container[str]) -> Pass:
    return step.without(left_out) if isinstance(step, Fixpoint) else step


def run_analyses(facts: Facts, options: Options) -> Facts:
    """What the analyses find in a graph, which they rewrite."""
    return _run(facts, analyses(options), options, None)


def _run(facts: Facts, steps: Iterable[Pass], options: Options, after: Callable[[Pass, Facts], None] | None) -> Facts:
    if facts.found_causality is not None:
        known = {*(step.name for step in analyses(options)), CompileBodies.name}
        steps = [step for step in steps if step.name not in known]
    verifier = Verifier.of(facts.joint.graph) if options.check_passes else None
    for step in steps:
        facts = guarded(step.name, facts, step.apply)
        if verifier is not None:
            verifier.check(step.name, facts)
        if after is not None:
            after(step, facts)
        if facts.stands is not None or (facts.found_axes is not None and facts.axes.sequence is None):
            break
    return facts
