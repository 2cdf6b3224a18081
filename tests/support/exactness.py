"""Eager autograd against `backend="streambp"`: every output, every parameter's gradient, every float input's.

    compare(model, {"ids": ids, "labels": labels}, chunk_size=7, also=(1, 16), attention={"causal"})

runs the model eagerly and compiled, and then, from the joint graph that was recorded, once more for each chunk size in
`also`: tracing is paid once. A relative error is norm(difference) / norm(truth); a gradient that is None has to be None
on both sides. Errors of a gradient that is zero up to rounding (a key's bias) are taken relative to all gradients.
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from streamfx.frontend.backend import Compilation
from streamfx.frontend.capture import initial_facts
from streamfx.ir.facts import Facts
from streamfx.ir.joint import is_assertion
from streamfx.ir.program import Program
from streamfx.options import Options, resolve_options
from streamfx.passes import run_pipeline
from streamfx.passes.partition.chunk_sizes import chunk_sizes
from streamfx.runtime.outer import HostProgram, HostProgramRunner
from streamfx.torch_private.dynamo import unwrap_errors

TOLERANCE = 1e-12
NOISE = 1e-3  # gradients below this share of all gradients are rounding: their error counts relative to that share

Inputs: TypeAlias = "Mapping[str, Any] | Sequence[Any]"
Reduce: TypeAlias = "Callable[[Any], Tensor]"


# -- one run


@dataclass(frozen=True)
class Outcome:
    """What one forward and one backward run left behind, by name."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    together: frozenset[frozenset[str]] = frozenset()  # pairs of tensors that lie in one memory
    attached: frozenset[str] = frozenset()  # outputs that ask for gradients


def scalar_of(outputs: Any) -> Tensor:
    """A number to differentiate: the loss where there is one, else a fixed weighted sum (a dense incoming gradient)."""
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    tensors = [item for item in pytree.tree_leaves(outputs) if isinstance(item, Tensor) and item.requires_grad]
    if len(tensors) == 1 and tensors[0].dim() == 0:
        return tensors[0]
    generator = torch.Generator().manual_seed(7)
    terms = [(item * torch.randn(item.shape, generator=generator, dtype=item.dtype)).sum() for item in tensors]
    return torch.stack(terms).sum()


def fresh(inputs: Inputs) -> Any:
    """The inputs as new leaves that ask for a gradient where the originals do."""

    def leaf(item: Any) -> Any:
        return item.detach().clone().requires_grad_(item.requires_grad) if isinstance(item, Tensor) else item

    return pytree.tree_map(leaf, inputs)


def call(function: Callable[..., Any], inputs: Inputs) -> Any:
    return function(**inputs) if isinstance(inputs, Mapping) else function(*inputs)


def outcome(function: Callable[..., Any], model: nn.Module, inputs: Inputs, reduce: Reduce = scalar_of) -> Outcome:
    """Run forward and backward, with gradients cleared before."""
    own = fresh(inputs)
    model.zero_grad(set_to_none=True)
    outputs = call(function, own)
    attached = frozenset(name for name, item in named_outputs(outputs).items() if item.requires_grad)
    reduce(outputs).backward()
    given = {f"input{pytree.keystr(path)}": item for path, item in pytree.tree_flatten_with_path(own)[0]}
    asked = {name: item for name, item in given.items() if isinstance(item, Tensor) and item.requires_grad}
    gradients = {name: item.grad for name, item in (*model.named_parameters(), *asked.items())}
    made = {f"gradient of {name}": item for name, item in gradients.items()}
    values = {f"value of {name}": item for name, item in (*model.named_parameters(), *given.items())}
    together = in_one_memory({**named_tensors(outputs), **made, **values})
    return Outcome(named_tensors(outputs), {name: clone(item) for name, item in gradients.items()}, together, attached)


def clone(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()


def in_one_memory(values: Mapping[str, Any]) -> frozenset[frozenset[str]]:
    """Pairs of plain tensors, by name, of which a write to one may change the other."""
    places: dict[int, list[str]] = {}
    for name, value in values.items():
        if (
            type(value) in (Tensor, nn.Parameter)
            and value.numel()
            and value.layout is torch.strided
            and value.device.type != "meta"
        ):
            places.setdefault(value.untyped_storage().data_ptr(), []).append(name)
    return frozenset(frozenset(pair) for names in places.values() for pair in itertools.combinations(names, 2))


def named_outputs(tree: Any) -> dict[str, Tensor]:
    leaves = pytree.tree_flatten_with_path(dict(tree) if isinstance(tree, Mapping) else tree)[0]
    return {f"output{pytree.keystr(path)}": item for path, item in leaves if isinstance(item, Tensor)}


def named_tensors(tree: Any) -> dict[str, Tensor]:
    return {name: item.detach() for name, item in named_outputs(tree).items()}


# -- errors


def relative_error(actual: Tensor, truth: Tensor, floor: float = 0.0) -> float:
    """norm(actual - truth) / norm(truth); NaN and infinity have to be in the same places."""
    if actual.shape != truth.shape or actual.dtype != truth.dtype:
        return math.inf
    if truth.is_complex():
        actual, truth = (torch.view_as_real(item.resolve_conj()) for item in (actual, truth))
    if not truth.is_floating_point():
        return 0.0 if torch.equal(actual, truth) else math.inf
    same = (actual == truth) | (actual.isnan() & truth.isnan())
    difference = torch.where(same, torch.zeros_like(truth), actual - truth).double()
    if not bool(difference.isfinite().all()):
        return math.inf
    norm = max(float(torch.where(truth.isfinite(), truth, 0.0).double().norm()), floor)
    distance = float(difference.norm())
    return distance / norm if norm > 0 else (0.0 if distance == 0 else math.inf)


def errors(actual: Outcome, truth: Outcome) -> dict[str, float]:
    """The relative error of every output and gradient; infinite where only one side has it."""
    assert actual.outputs.keys() == truth.outputs.keys(), (list(actual.outputs), list(truth.outputs))
    found = {name: relative_error(actual.outputs[name], truth.outputs[name]) for name in truth.outputs}
    found |= {f"memory of {' and '.join(sorted(pair))}": math.inf for pair in actual.together - truth.together}
    found |= {f"gradients of {name}": math.inf for name in actual.attached ^ truth.attached}
    return found | gradient_errors(actual.gradients, truth.gradients)


def gradient_errors(
    actual: Mapping[str, Tensor | None], truth: Mapping[str, Tensor | None], noise: float = NOISE
) -> dict[str, float]:
    assert actual.keys() == truth.keys(), (list(actual), list(truth))
    squares = [float(torch.nan_to_num(g).double().square().sum()) for g in truth.values() if g is not None]
    floor = noise * math.sqrt(sum(squares))
    found: dict[str, float] = {}
    for name, wanted in truth.items():
        got = actual[name]
        if got is None or wanted is None:
            found[name] = 0.0 if got is wanted else math.inf
        else:
            found[name] = relative_error(got, wanted, floor)
    return found


def assert_small(found: Mapping[str, float], tolerance: float, what: str) -> None:
    wrong = {name: error for name, error in found.items() if not error <= tolerance}
    if wrong:
        worst = sorted(wrong.items(), key=lambda item: -item[1])
        lines = [f"  {name}: {error:.2e}" for name, error in worst[:12]]
        raise AssertionError(
            f"{what}: {len(wrong)} of {len(found)} differ from eager by more than {tolerance}\n" + "\n".join(lines)
        )


# -- recording what the backend was given


@dataclass
class Recorded(Compilation):
    """A compilation that keeps the joint graph, which is one, and the values it was first run with."""

    may_split = False
    joint: fx.GraphModule | None = None
    joint_arguments: tuple[int, int, tuple[int, ...]] = (0, 0, ())
    primals: list[Any] | None = None
    tangents: list[Any] | None = None
    is_forward: bool = False

    def partition(self, joint: fx.GraphModule, joint_inputs: Any, **others: Any) -> Any:
        if isinstance(joint_inputs, tuple):
            static = others.get("static_lifetime_input_indices") or ()
            self.joint = joint
            self.joint_arguments = (len(joint_inputs[0]), others["num_fwd_outputs"], tuple(static))
        return super().partition(joint, joint_inputs, **others)

    def run_forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.is_forward = True
        inner = super().run_forward(module, inputs)
        self.is_forward = False

        def forward(arguments: list[Any]) -> Any:
            if self.primals is None:
                self.primals = list(arguments)
            return inner(arguments)

        return boxed(forward)

    def run(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        inner = super().run(module, inputs)
        if self.is_forward or self.joint is None:
            return inner

        def backward(arguments: list[Any]) -> Any:
            if self.tangents is None:
                assert self.joint is not None
                placeholders = self.joint.graph.find_nodes(op="placeholder")
                count = len(placeholders) - self.joint_arguments[0]
                self.tangents = list(arguments[len(arguments) - count :])
            return inner(arguments)

        return boxed(backward)

    # -- the same graph again

    def facts_for(self, options: Options) -> Facts:
        assert self.joint is not None
        num_primals, num_outputs, static = self.joint_arguments
        capture = partial(
            initial_facts, self.joint, num_primals, num_outputs, static, self.patterns(self.joint.graph, num_primals)
        )
        return run_pipeline(capture, options)

    def facts_in_chunks(self, options: Options) -> Facts:
        """The facts for other options; where they ask for nothing but other chunks, the program that is there, run in these."""
        facts, (rows, own) = self.facts[-1], (_rows_of_all(options), _rows_of_all(self.options))
        same = replace(options, chunk_size=self.options.chunk_size, loss_chunk_size=self.options.loss_chunk_size)
        loops = facts.program.loops if facts.program is not None else ()
        if rows is None or own is None or same != self.options or any(loop.compiled is not None for loop in loops):
            return self.facts_for(options)
        for loop in loops:
            loop.spec = replace(loop.spec, chunk_size=chunk_sizes(facts, options)[0])
        return facts

    def joint_values(self) -> list[Any]:
        """Outputs and gradients by the joint graph as AOTAutograd made it."""
        assert self.joint is not None and self.primals is not None and self.tangents is not None
        with torch.no_grad():
            return leaves(HostProgram(self.joint).run([*self.primals, *self.tangents]))

    def streamed_values(self, program: Program) -> list[Any]:
        """Outputs and gradients by a rewritten program."""
        assert self.primals is not None and self.tangents is not None and self.joint is not None
        graphs = [module.graph for module in (program.forward, program.backward) if module is not None]
        asserted = [sum(map(is_assertion, graph.nodes)) for graph in (self.joint.graph, *graphs)]
        assert sum(asserted[1:]) >= asserted[0], "an assertion is gone"
        count = self.joint_arguments[1]
        results = list(HostProgramRunner(program.forward)(list(self.primals)))
        outputs, saved = results[:count], results[count:]
        if program.backward is None:
            return outputs
        tensors, numbers = saved[: len(program.saved)], saved[len(program.saved) :]
        given = {f"given {i}": item for i, item in enumerate([*self.primals, *self.tangents, *tensors])}
        del results, saved
        gradients = list(HostProgramRunner(program.backward)([*numbers, *tensors, *self.tangents]))
        values = {**given, **{f"gradient {i}": item for i, item in enumerate(gradients)}}
        wrong = [pair for pair in in_one_memory(values) if any(name.startswith("gradient") for name in pair)]
        assert not wrong, f"in one memory: {[sorted(pair) for pair in wrong]}"
        return [*outputs, *gradients]


def _rows_of_all(options: Options) -> int | None:
    """The rows of a chunk, where all stages are asked for as many, whatever they hold."""
    rows = options.chunk_size
    return rows if isinstance(rows, int) and rows == options.loss_chunk_size and options.memory_budget is None else None


def boxed(function: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def leaves(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree, is_leaf=lambda item: item is None)


@dataclass
class Recorder:
    """A backend like "streambp" that keeps its compilations, of the given kind."""

    options: Options
    compilations: list[Any] = field(default_factory=list)
    kind: type[Compilation] = Recorded

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        recorded = self.kind(module, self.options)
        with unwrap_errors(module.graph):
            function = recorded.compile(example_inputs)
        self.compilations.append(recorded)  # only now: Dynamo starts anew where AOTAutograd asks it to
        return function

    @property
    def facts(self) -> list[Facts]:
        return [facts for compilation in self.compilations for facts in compilation.facts]


def recorder(**options: Any) -> Recorder:
    return Recorder(resolve_options({"outputs": "dense", **options}))


# -- the comparison


@dataclass(frozen=True)
class Report:
    errors: dict[str, float]
    recorder: Recorder

    @property
    def facts(self) -> list[Facts]:
        return self.recorder.facts


def compare(
    model: nn.Module,
    inputs: Inputs,
    *,
    chunk_size: int = 7,
    also: Iterable[int] = (),
    attention: set[str] | None = None,
    streams: bool | None = True,
    graphs: int | None = 1,
    reduce: Reduce = scalar_of,
    tolerance: float = TOLERANCE,
    faults: bool = False,
    **options: Any,
) -> Report:
    """Assert that the compiled model equals the eager one.

    `streams` asks that no operator runs whole for lack of a rule or of key spans (None: does not matter), `attention` that
    exactly these verdicts were found, `graphs` how many graphs were compiled (None: any number), `faults` allows passes to fail.
    """
    torch._dynamo.reset()
    truth = outcome(eager := copy.deepcopy(model), eager, inputs, reduce)
    backend = recorder(**{"chunk_size": chunk_size, "loss_chunk_size": chunk_size, **options})
    own = copy.deepcopy(model)
    found = errors(outcome(torch.compile(own, backend=backend), own, inputs, reduce), truth)
    assert_small(found, tolerance, f"chunks of {chunk_size}")
    if graphs is not None:
        assert len(backend.compilations) == graphs, f"{len(backend.compilations)} graphs instead of {graphs}"
    check_streamed(backend.facts, streams, attention)
    failed = [fault for facts in backend.facts for fault in facts.faults]
    assert faults or not failed, f"passes have failed: {failed}"
    for other in also:
        compare_replayed(backend, other, tolerance, options)
    return Report(found, backend)


def check_streamed(facts: Sequence[Facts], streams: bool | None, attention: set[str] | None) -> None:
    failed = [one.analysis_error for one in facts if one.analysis_error]
    assert not failed, f"the analysis failed: {failed}"
    reasons = [reason for one in facts for reason in one.reasons()]
    rewritten = [one for one in facts if one.program is not None]
    if streams is not None:
        does = bool(rewritten) and not reasons
        assert does == streams, f"streams: {does} instead of {streams}; {len(rewritten)} graphs rewritten; {reasons}"
    if attention is not None:
        verdicts = {verdict for one in facts if (known := one.found_key_spans) for verdict in known.span_kinds.values()}
        assert verdicts == attention, f"attention {verdicts} instead of {attention}"


def compare_replayed(backend: Recorder, chunk_size: int, tolerance: float, options: Mapping[str, Any]) -> None:
    """Run the recorded graphs in chunks of another size, and compare with the graphs as they were."""
    own = {**backend.options.as_dict(), **options, "chunk_size": chunk_size, "loss_chunk_size": chunk_size}
    for recorded in backend.compilations:
        if recorded.joint is None or recorded.primals is None or recorded.tangents is None:
            continue
        facts = recorded.facts_in_chunks(resolve_options(own))
        if facts.program is None:
            continue
        truth, actual = recorded.joint_values(), recorded.streamed_values(facts.program)
        assert_small(value_errors(actual, truth, recorded.joint_arguments[1]), tolerance, f"chunks of {chunk_size}, replayed")


def value_errors(actual: Sequence[Any], truth: Sequence[Any], num_outputs: int, noise: float = NOISE) -> dict[str, float]:
    """Errors of the flat results of a joint graph: outputs first, then gradients."""
    assert len(actual) == len(truth)
    named = {f"gradient {i}": item for i, item in enumerate(truth[num_outputs:])}
    got = {f"gradient {i}": item for i, item in enumerate(actual[num_outputs:])}
    found = gradient_errors(got, named, noise)
    for i, (one, other) in enumerate(zip(actual[:num_outputs], truth[:num_outputs], strict=True)):
        if isinstance(other, Tensor):
            found[f"output {i}"] = relative_error(one, other)
    return found
