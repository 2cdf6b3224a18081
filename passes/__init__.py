"""The pass pipeline: passes in order, each a function from `Facts` to `Facts`.

This package turns a joint graph into two host programs of loops over chunks. It knows every graph-level fact, and
nothing of the user's module beyond the graph. It may import `cost`, `runtime`, `kernels`, `ir` and the layers below
them, and is imported by the frontend and the tools.
"""

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
from streamfx.passes.lowering import lowerings as _emitters  # noqa: F401  (fills the table of lowerings)
from streamfx.passes.lowering import running_lowerings as _running  # noqa: F401  (so does this import)
from streamfx.passes.lowering.buckets import Buckets
from streamfx.passes.lowering.build_program import BuildProgram
from streamfx.passes.lowering.compile_bodies import CompileBodies
from streamfx.passes.lowering.hoist_masks import HoistMasks
from streamfx.passes.lowering.reinsert_collectives import ReinsertCollectives
from streamfx.passes.ops.fallback import FallbackError
from streamfx.passes.partition.budget_search import BudgetSearch
from streamfx.passes.partition.chunk_plan import Plan
from streamfx.passes.partition.loss_gradient import LossGradient
from streamfx.passes.partition.stages import StagesPass
from streamfx.passes.rewrite.attention.compressed_kv import KeysInBlocks
from streamfx.passes.rewrite.attention.split_concat_kv import JoinedKeys
from streamfx.passes.rewrite.canonicalize import Canonicalize
from streamfx.passes.rewrite.collectives.merge_all_reduces import SumsOverRanks
from streamfx.passes.rewrite.collectives.unshard import Unshard
from streamfx.passes.rewrite.views.decompose_on_sequence import SumsAlongSequence
from streamfx.passes.scan.recurrences import Recurrences
from streamfx.passes.scan.split_shared import OwnTables
from streamfx.passes.scan.truncated_bptt import Truncations
from streamfx.passes.verifier import Verifier


class Pass(Protocol):
    """A function from facts to facts: an analysis adds a fact, a rewrite changes the graph."""

    @property
    def name(self) -> str: ...

    def apply(self, facts: Facts) -> Facts: ...


@dataclass(frozen=True)
class Fixpoint:
    """An analysis, alternated with the rewrites that it enables until no rewrite applies."""

    analysis: Pass
    rewrites: tuple[Pass, ...]

    @property
    def name(self) -> str:
        return self.analysis.name

    def apply(self, facts: Facts) -> Facts:
        """Run the analysis; after each rewrite that changes the graph, run it again."""
        facts = self.analysis.apply(facts)
        while (rewritten := self._rewritten(facts)) is not facts:
            facts = guarded(self.name, rewritten, self.analysis.apply)
        return facts

    def _rewritten(self, facts: Facts) -> Facts:
        """Return the facts after the first rewrite that changes them, or the same object if none does."""
        rewrites = (guarded(rewrite.name, facts, rewrite.apply) for rewrite in self.rewrites)
        return next((rewritten for rewritten in rewrites if rewritten is not facts), facts)

    def without(self, left_out: Container[str]) -> Pass:
        """Return a copy that lacks the rewrites with these names."""
        return replace(self, rewrites=tuple(rewrite for rewrite in self.rewrites if rewrite.name not in left_out))


def analyses(options: Options) -> tuple[Pass, ...]:
    """The passes that analyze the graph and reduce it to fewer operators, before it is cut into stages."""
    return (
        Unshard(),  # remove collectives on weights alone: later passes see the unsharded model
        Canonicalize(),  # rewrite to the fewest operators
        Recurrences(),  # find unrolled loops that carry a state from row to row
        Fixpoint(
            Axes(), (JoinedKeys(own_keys), KeysInBlocks(), SumsAlongSequence(), OwnTables(), SumsOverRanks())
        ),  # find the sequence axis in every dimension of every value
        AccessRoles(),  # find the rows that each operator needs of its operands
        Truncations(options),  # limit how many rows gradients of states reach back, if requested
        KeySpans(),  # find the keys that a chunk's query positions can see
    )


def pipeline(options: Options) -> tuple[Pass, ...]:
    """Return all passes, in order."""
    put_back = ReinsertCollectives(options)
    return (
        *analyses(options),
        StagesPass(),  # find the cheapest cuts
        LossGradient(),  # compute the loss gradient with the loss, if the loss stage can (the one rewrite that needs stages)
        Plan(options),  # choose the chunk size and the values to store
        BuildProgram(),  # replace the joint graph by loops
        put_back,  # insert collectives on weights into the host programs
        BudgetSearch(
            options, lambda facts: put_back.apply(BuildProgram().apply(facts))
        ),  # find the fastest plan within the memory budget
        Buckets(),  # merge collectives
        HoistMasks(),  # hoist masks that can be computed once per step
        CompileBodies(options),  # choose how each loop body is executed
    )


def run_pipeline(
    capture: Callable[[], Facts],
    options: Options,
    after: Callable[[Pass, Facts], None] | None = None,
    analysed: Callable[[], Facts] | None = None,
) -> Facts:
    """Run all passes on a fresh graph, which `capture` returns; `after` is called with each pass and its facts.

    Without a sequence axis nothing is rewritten. `analysed` supplies a graph whose analyses are precomputed (dry
    runs): passes start after them and stop before bodies are lowered.

    If a pass cannot chunk an operator, or fails at it, that operator falls back to the full sequence and all passes
    run again.
    """
    remedies = Remedies()
    while True:
        try:
            if analysed is not None:
                return _within_budget(analysed, options, after)
            return _within_budget(lambda: remedies.applied(capture()), options, after, remedies.left_out)
        except (FallbackError, PassFailedError) as failure:
            if analysed is not None:
                analysed = None
            elif isinstance(failure, FallbackError):
                if not remedies.help_with_refusal(failure):
                    raise
            elif options.strict:
                raise failure.refused() from failure.error
            elif not remedies.add_remedy(failure):
                raise failure.error from None


def _within_budget(
    capture: Callable[[], Facts],
    options: Options,
    after: Callable[[Pass, Facts], None] | None,
    left_out: Container[str] = (),
) -> Facts:
    """Run the passes. If no plan with a separate last stage for the head fits the memory budget, retry without one."""
    steps = [_without(step, left_out) for step in pipeline(options) if step.name not in left_out]
    if options.memory_budget is None:
        return _run(capture(), steps, options, after)
    try:
        return _run(capture(), steps, options, after)
    except OverBudgetError as error:
        try:
            without = [LossGradient(may_cut=False) if isinstance(step, LossGradient) else step for step in steps]
            return _run(capture(), without, options, after)
        except OverBudgetError as other:
            raise min(error, other, key=lambda item: item.smallest) from None


def _without(step: Pass, left_out: Container[str]) -> Pass:
    """Return the pass without the rewrites named in `left_out`."""
    return step.without(left_out) if isinstance(step, Fixpoint) else step


def run_analyses(facts: Facts, options: Options) -> Facts:
    """Run the analyses, with the rewrites among them."""
    return _run(facts, analyses(options), options, None)


def _run(facts: Facts, steps: Iterable[Pass], options: Options, after: Callable[[Pass, Facts], None] | None) -> Facts:
    """Run passes in order, skip analyses whose facts exist, and stop if there is nothing to chunk."""
    if facts.found_key_spans is not None:
        analysis_names = {*(step.name for step in analyses(options)), CompileBodies.name}
        steps = [step for step in steps if step.name not in analysis_names]
    verifier = Verifier.of(facts.joint.graph) if options.check_passes else None
    for step in steps:
        facts = guarded(step.name, facts, step.apply)
        if verifier is not None:
            verifier.check(step.name, facts)
        if after is not None:
            after(step, facts)
        if facts.unchunked_reason is not None or (facts.found_axes is not None and facts.axes.sequence is None):
            break
    return facts
