"""The pass pipeline: passes in order, each a function from `Facts` to `Facts`.

`Facts` (ir/facts.py) holds AOTAutograd's joint graph, the results of each analysis, and finally two *host programs*: graphs
that replace forward and backward, and call loops over chunks of the sequence. An operator that no loop can run *falls back*:
it runs on the full sequence, between loops. The passes know nothing of the user's module but its graph. This package may
import `cost`, `runtime`, `kernels`, `dialect`, `ir` and the layers below them, and is imported by the frontend and the tools.
"""

if __name__ != "streamfx.passes":
    raise ImportError(f"this folder is the package streamfx.passes, not {__name__!r}: write `import streamfx.passes`")

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from streamfx.errors import OverBudgetError
from streamfx.ir.dynamic_lengths import Lengths
from streamfx.ir.facts import Facts
from streamfx.options import Options
from streamfx.passes.analysis.access_roles import AccessRoles
from streamfx.passes.analysis.axes import Axes
from streamfx.passes.analysis.diagonal_visible import find_diagonal_keys
from streamfx.passes.analysis.key_spans import KeySpans
from streamfx.passes.faults import PassFailedError, Remedies, apply_guarded
from streamfx.passes.lowering import lowerings as _emitters  # noqa: F401  (fills the table of lowerings)
from streamfx.passes.lowering import running_lowerings as _running  # noqa: F401  (so does this import)
from streamfx.passes.lowering.buckets import Buckets
from streamfx.passes.lowering.build_program import BuildProgram
from streamfx.passes.lowering.compile_bodies import CompileBodies
from streamfx.passes.lowering.hoist_masks import HoistMasks
from streamfx.passes.lowering.reinsert_collectives import ReinsertCollectives
from streamfx.passes.ops.fallback import FallbackError
from streamfx.passes.partition.budget_search import BudgetSearch
from streamfx.passes.partition.chunk_plan import ChunkPlan
from streamfx.passes.partition.loss_gradient import LossGradient
from streamfx.passes.partition.plan_simulator import PlanSimulator
from streamfx.passes.partition.stages import FindStages
from streamfx.passes.rewrite.attention.compressed_kv import CompressedKV
from streamfx.passes.rewrite.attention.split_concat_kv import SplitConcatKV
from streamfx.passes.rewrite.canonicalize import Canonicalize
from streamfx.passes.rewrite.collectives.merge_all_reduces import MergeAllReduces
from streamfx.passes.rewrite.collectives.unshard import Unshard
from streamfx.passes.rewrite.views.decompose_on_sequence import DecomposeOnSequence
from streamfx.passes.scan.recurrences import Recurrences
from streamfx.passes.scan.split_shared import SplitShared
from streamfx.passes.scan.truncated_bptt import TruncatedBPTT
from streamfx.passes.verifier import Verifier
from streamfx.runtime import implementations as _implementations  # noqa: F401  (the operators in programs run)


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
        while (rewritten := self._apply_one_rewrite(facts)) is not facts:
            facts = apply_guarded(self.name, rewritten, self.analysis.apply)
        return facts

    def _apply_one_rewrite(self, facts: Facts) -> Facts:
        """Try the rewrites in order; return the facts after the first one that changes the graph.

        A rewrite that does not apply returns its argument itself. If none applies, return `facts`, the same object.
        """
        rewrites = (apply_guarded(rewrite.name, facts, rewrite.apply) for rewrite in self.rewrites)
        return next((rewritten for rewritten in rewrites if rewritten is not facts), facts)

    def without(self, rewrite_names: Container[str]) -> Pass:
        """Return a copy of this fixpoint without the rewrites of these names; the analysis stays."""
        return replace(self, rewrites=tuple(rewrite for rewrite in self.rewrites if rewrite.name not in rewrite_names))


def analyses(options: Options) -> tuple[Pass, ...]:
    """Return the passes before the graph is divided into stages: they find facts, and rewrite it to fewer operators."""
    return (
        Unshard(),  # remove collectives on weights alone: later passes see the unsharded model
        Canonicalize(),  # rewrite to the fewest operators
        Recurrences(),  # find unrolled loops that carry a state from row to row
        Fixpoint(
            Axes(), (SplitConcatKV(find_diagonal_keys), CompressedKV(), DecomposeOnSequence(), SplitShared(), MergeAllReduces())
        ),  # find the sequence axis in every dimension of every value
        AccessRoles(),  # find the rows that each operator needs of its operands
        TruncatedBPTT(options),  # limit how many rows gradients of states reach back, if requested
        KeySpans(),  # find the keys that a chunk's query positions can see
    )


def pipeline(options: Options) -> tuple[Pass, ...]:
    """Return all passes, in order: from the traced joint graph to two host programs with loops over chunks."""
    return (
        *analyses(options),
        FindStages(),  # cut the graph into stages, where the fewest bytes cross
        LossGradient(),  # compute the loss gradient with the loss, if the loss stage can (the one rewrite that needs stages)
        ChunkPlan(options),  # choose the chunk size and the values to store
        BuildProgram(),  # replace the joint graph by loops
        ReinsertCollectives(options),  # insert collectives on weights into the host programs
        BudgetSearch(options, program_builder(options)),  # find the fastest plan within the memory budget
        Buckets(),  # merge collectives
        HoistMasks(),  # hoist masks that can be computed once per step
        CompileBodies(options),  # choose how each loop body is executed
    )


def program_builder(options: Options) -> Callable[[Facts], Facts]:
    """Return a function that adds the program of a plan to the facts that have the plan."""
    reinsert_collectives = ReinsertCollectives(options)
    return lambda facts: reinsert_collectives.apply(BuildProgram().apply(facts))


def plan_simulator(facts: Facts, options: Options) -> PlanSimulator:
    """Return a simulator of other plans for a graph, from the facts of a finished pipeline."""
    return PlanSimulator(facts, options, program_builder(options), Lengths.of_current_call(facts.joint.graph))


def run_pipeline(
    capture: Callable[[], Facts],
    options: Options,
    after: Callable[[Pass, Facts], None] | None = None,
    capture_analyzed: Callable[[], Facts] | None = None,
) -> Facts:
    """Run all passes on a fresh graph, which `capture` returns, and return the final facts.

    If a pass cannot run an operator in a loop, or fails at it, the operator falls back (runs on the full sequence, between
    loops), and all passes run again. If there is no sequence axis, the passes stop after the axis analysis.
    `after(pass, facts)` is called after each pass. With the option `strict`, a failed pass raises `NotStreamedError`.

    For dry runs, `capture_analyzed` returns a graph with the facts of all analyses. Only the later passes run, without
    `compile_bodies`; if one fails, all passes run on the graph of `capture`.
    """
    remedies = Remedies()
    while True:
        try:
            if capture_analyzed is not None:
                return _within_budget(capture_analyzed, options, after)
            return _within_budget(lambda: remedies.apply_to(capture()), options, after, remedies.skipped)
        except (FallbackError, PassFailedError) as failure:
            if capture_analyzed is not None:
                capture_analyzed = None
            elif isinstance(failure, FallbackError):
                if not remedies.add_fallback(failure):
                    raise
            elif options.strict:
                raise failure.as_strict_error() from failure.error
            elif not remedies.add_remedy(failure):
                raise failure.error from None


def _within_budget(
    capture: Callable[[], Facts],
    options: Options,
    after: Callable[[Pass, Facts], None] | None,
    skipped: Container[str] = (),
) -> Facts:
    """Run the passes, without those named in `skipped`, on the graph that `capture` returns; return the final facts.

    If no plan fits the memory budget, run them again without a separate stage for the model's head (`may_cut`). If that
    does not fit either, raise the `OverBudgetError` with the smaller peak.
    """
    passes = [_without_rewrites(a_pass, skipped) for a_pass in pipeline(options) if a_pass.name not in skipped]
    if options.memory_budget is None:
        return _run(capture(), passes, options, after)
    try:
        return _run(capture(), passes, options, after)
    except OverBudgetError as error:
        try:
            passes = [LossGradient(may_cut=False) if isinstance(a_pass, LossGradient) else a_pass for a_pass in passes]
            return _run(capture(), passes, options, after)
        except OverBudgetError as second_error:
            smaller = min(
                error, second_error, key=lambda over_budget: over_budget.smallest
            )  # peak of the smallest plan, in bytes
            raise smaller from None


def _without_rewrites(a_pass: Pass, skipped: Container[str]) -> Pass:
    """Return the pass; if it is a fixpoint of an analysis and rewrites, without the rewrites named in `skipped`."""
    return a_pass.without(skipped) if isinstance(a_pass, Fixpoint) else a_pass


def run_analyses(facts: Facts, options: Options) -> Facts:
    """Run only the analyses, and the rewrites among them, on facts of a traced graph; return the facts they establish."""
    return _run(facts, analyses(options), options, None)


def _run(facts: Facts, passes: Iterable[Pass], options: Options, after: Callable[[Pass, Facts], None] | None) -> Facts:
    """Run passes in order; return the facts after the last. Call `after(pass, facts)` after each.

    If `facts` has the result of the last analysis (a dry run), omit the analyses and the compilation of loop bodies.
    Stop early if a pass decides that the graph runs unchunked, or the graph has no sequence axis.
    """
    if facts.found_key_spans is not None:  # key spans are the last analysis
        omitted = {*(analysis.name for analysis in analyses(options)), CompileBodies.name}
        passes = [a_pass for a_pass in passes if a_pass.name not in omitted]
    verifier = Verifier.of(facts.joint.graph) if options.check_passes else None
    for a_pass in passes:
        facts = apply_guarded(a_pass.name, facts, a_pass.apply)
        if verifier is not None:
            verifier.check(a_pass.name, facts)
        if after is not None:
            after(a_pass, facts)
        if facts.unchunked_reason is not None or (facts.found_axes is not None and facts.axes.sequence is None):
            break
    return facts
