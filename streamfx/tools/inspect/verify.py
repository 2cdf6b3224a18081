"""`streamfx.verify`: run the same call in eager mode and through the backend, and compare the loss and all gradients.

The *sources* are the tensors whose gradients are compared: parameters and inputs. Each check of the call (`_check_...`) raises
`NotComparableError`, which says what was found and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from streamfx.argument_checks import check_call, require
from streamfx.cost.nested_tensors import tensors_returned
from streamfx.distributed.zero_3 import refuse_partitioned
from streamfx.errors import NotComparableError, StreamFXError, describe_error, with_article
from streamfx.frontend.backend import Compilation
from streamfx.node_meta import EXAMPLE_VALUE, VALUE
from streamfx.options import resolve_options
from streamfx.renamed import RenamedAttributes
from streamfx.runtime.background_bodies import wait_for_compiled_bodies
from streamfx.tools.inspect.chunk_override import ChunkedCompilation, why_not_chunked
from streamfx.tools.inspect.input_checks import DO, advice_on, empty_inputs_text
from streamfx.tools.inspect.keywords import split_options
from streamfx.tools.inspect.side_effect_guard import (
    original,
    parameters_of,
    restored_randomness,
    serialized,
    without_side_effects,
)
from streamfx.tools.report.notices import Record, record_of
from streamfx.torch_private import FakeTensor, keystr, tree_flatten_with_path, tree_leaves
from streamfx.torch_private.dynamo import SWITCH_ON, SWITCHED_OFF, is_switched_off, isolated_compilation, unwrap_errors

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
MAX_SHOWN = 8
NOTHING = "the loss and all gradients are zero or NaN: nothing was compared"
NONZERO = "give inputs, weights and a loss whose eager gradients are finite and not all zero"
RANDOM = (
    "the model draws random numbers (dropout?): eager mode for all rows at once, the backend for each chunk separately, so no "
    "seed gives both the same numbers"
)
NOT_RANDOM = "call model.eval(), or set the probabilities of dropout to 0"
IN_EAGER = "no graph reaches the backend: the call runs in eager mode"
REQUIREMENT = "streamfx.verify takes a call that gives the same result twice"


@check_call(NotComparableError, "streamfx.verify(...)")
@serialized
def verify(
    model: Callable[..., Any], *args: Any, loss: Callable[[Any], Tensor] | None = None, options: Any = None, **kwargs: Any
) -> Verification:
    """Run `model(*args, **kwargs)` and its gradients in eager mode and through the backend, and compare.

    `loss` maps the model's output to the scalar to differentiate. By default that is `output.loss`, the output itself if it is a
    scalar, or a fixed random combination of all its floating point tensors. Gradients of parameters and inputs are compared. The
    model's state, its `.grad`s and all random generators are left unchanged. Automatic chunk sizes give at least three chunks.

    Args:
        model: a module, or a function of one.
        args, kwargs: the arguments of the call. A keyword named like an option (`chunk_size=512`) is an option, unless `forward`
            has an argument of that name.
        loss: a function from the output to a tensor with one element.
        options: the backend's, as a dictionary or `streamfx.Options`; by default those that the model was compiled with.

    Returns:
        The differences. It prints; `ok` is true if all are within rounding, and `max_error` is the largest.

    Raises:
        NotComparableError: the call fails in eager mode, draws random numbers, has no loss, or computes nothing (an empty batch).
        OptionError: an unknown option, or an invalid value.
        OverBudgetError: no plan fits `memory_budget`.

    Example:
        >>> import torch, streamfx
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)).double()
        >>> found = streamfx.verify(model, torch.randn(2, 64, 8).double(), loss=lambda y: y.square().mean(), chunk_size=16)
        >>> found.ok, found.max_error < 1e-12
        (True, True)
    """
    option_values, kwargs = split_options(model, options, args, kwargs, "streamfx.verify(...)")
    model, backend_options = original(model), resolve_options(option_values)
    sources = gradient_sources(model, (args, kwargs))
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    _check_arguments(model, loss, [*sources.values(), *given])
    compilations: list[Compilation] = []

    def backend(module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Compile a graph with several chunks per loop, and record its compilation."""
        compilations.append(ChunkedCompilation(module, backend_options))
        with unwrap_errors(module.graph):
            return compilations[-1].compile(inputs)

    def run(function: Callable[..., Any]) -> Run:
        """Return the loss and gradients of a function of the call, without side effects on the model."""
        with without_side_effects(model):
            return run_of(lambda: function(*args, **kwargs), loss or default_loss, list(sources.values()))

    with failing_in_eager((args, kwargs)):
        eager = run(model)
    require(not eager.is_random, NotComparableError, REQUIREMENT, RANDOM, NOT_RANDOM)
    with isolated_compilation(backend) as keywords, wait_for_compiled_bodies():  # a later step would run compiled bodies
        streamed = run(torch.compile(model, backend=backend, **keywords))
    _check_arrived(compilations)
    precision, not_chunked = lowest_precision(compilations, sources.values()), why_not_chunked(compilations)
    records = [record_of(facts, i) for i, facts in enumerate(facts for compiled in compilations for facts in compiled.facts)]
    verification = Verification(list(sources), eager, streamed, precision, backend_options.adjoints, not_chunked, records)
    _check_evidence(verification, (args, kwargs))
    return verification


def _check_arrived(compilations: Sequence[Compilation]) -> None:
    """Raise `NotComparableError` if no graph of the call reached the backend, so that both runs were in eager mode."""
    found, do = (SWITCHED_OFF, SWITCH_ON) if is_switched_off() else (IN_EAGER, "streamfx.explain shows the reason")
    asked = "streamfx.verify takes a call that torch.compile can trace"
    require(bool(compilations), NotComparableError, asked, found, do)


def _check_evidence(verification: Verification, inputs: Any) -> None:
    """Raise `NotComparableError` if all results are zero or NaN: equal zeros are no evidence."""
    empty = empty_inputs_text(inputs)
    found, do = (f"{empty}, and {NOTHING}", DO) if empty else (NOTHING, NONZERO)
    is_evidence = not (verification.ok and verification.compares_nothing)
    require(is_evidence, NotComparableError, "streamfx.verify takes a call whose results can be compared", found, do)


@contextmanager
def failing_in_eager(inputs: Any) -> Iterator[None]:
    """Context manager: raise an error of the block, the call in eager mode, as `NotComparableError`; `inputs`: the call's."""
    try:
        yield
    except StreamFXError:
        raise
    except Exception as error:
        raise NotComparableError(
            REQUIREMENT,
            found=f"in eager mode, without the backend, it raises {describe_error(error)}",
            do=advice_on(inputs)
            or "check that model(*args, **kwargs) runs with these arguments, and that its loss has gradients",
        ) from error


@dataclass(frozen=True)
class Run:
    """The result of one run: the loss, one gradient per source (None if it does not affect the loss), and whether it
    drew random numbers.
    """

    loss: Tensor
    gradients: tuple[Tensor | None, ...]
    is_random: bool


def run_of(call: Callable[[], Any], loss: Callable[[Any], Tensor], sources: Sequence[Tensor]) -> Run:
    """Run `call`, the loss of its output, and the gradients of `sources`; random generators are restored afterwards.

    Raises:
        NotComparableError: if the loss is not a tensor with one element.
    """
    with restored_randomness(), torch.enable_grad():
        states_before = generator_states()
        value = loss(call())
        is_loss, do = isinstance(value, Tensor) and value.numel() == 1, "let loss= return a tensor with one element"
        require(is_loss, NotComparableError, REQUIREMENT, f"the loss is {_type_text(value)}", do)
        is_random = has_drawn(states_before)
        gradients: tuple[Tensor | None, ...] = tuple(None for _ in sources)
        if value.requires_grad and sources:
            gradients = torch.autograd.grad(value.reshape(()), list(sources), allow_unused=True)
        return Run(value.detach().reshape(()).clone(), gradients, is_random)


class Verification(RenamedAttributes):
    """Differences between eager mode and the backend, relative to eager's norms.

    `errors` maps each parameter and input to the norm of the difference of its gradients, divided by their norm.
    Differences below the rounding error of the whole gradient count as zero, because a gradient that consists of
    rounding errors cannot be compared.

    Args:
        names: of the tensors whose gradients are compared.
        eager: the run without the backend; `streamfx.verify` creates both runs.
        streamed: the run through the backend.
        precision: the least precise dtype of the computation; it determines the tolerance.
        adjoints: how far the gradients of recurrences reach back; truncated ones differ from eager.
        not_chunked: why the comparison does not exercise the values passed between chunks, or an empty string.
        records: a record of each graph that ran.

    Example:
        >>> import torch, streamfx
        >>> found = streamfx.verify(torch.nn.Linear(8, 8), torch.randn(1, 64, 8), chunk_size=16)
        >>> print(found)  # doctest: +ELLIPSIS
        streamfx: equal to eager; largest relative difference ...
        >>> sorted(found.errors)
        ['bias', 'weight']
    """

    renamed: ClassVar[Mapping[str, str]] = {"not_cut": "not_chunked", "says_nothing": "compares_nothing"}

    def __init__(
        self,
        names: Sequence[str],
        eager: Run,
        streamed: Run,
        precision: torch.dtype,
        adjoints: int | str = "exact",
        not_chunked: str = "",
        records: Sequence[Record] = (),
    ) -> None:
        self.adjoints, self.not_chunked, self.records = adjoints, not_chunked, tuple(records)
        self.loss, self.streamed_loss = eager.loss.item(), streamed.loss.item()
        self.loss_error = relative_difference(streamed.loss, eager.loss, 0.0)
        self.precision, self.tolerance = precision, TOLERANCES.get(precision, 1e-2)
        self.norms = {name: _norm(gradient) for name, gradient in zip(names, eager.gradients, strict=True)}
        finite = [_norm(_finite(gradient)) for gradient in eager.gradients]
        floor = torch.finfo(precision).eps / self.tolerance * sum(norm**2 for norm in finite) ** 0.5
        pairs = zip(names, streamed.gradients, eager.gradients, strict=True)
        self.errors = {name: relative_difference(ours, theirs, floor) for name, ours, theirs in pairs}

    @property
    def max_error(self) -> float:
        """The largest relative difference of the loss and all gradients."""
        return max([self.loss_error, *self.errors.values()])

    @property
    def compares_nothing(self) -> bool:
        """Whether eager's loss and all its gradients are zero or not finite."""
        return not any(math.isfinite(number) and number for number in (self.loss, *self.norms.values()))

    @property
    def ok(self) -> bool:
        """Whether all differences are within the tolerance of the dtype."""
        return self.max_error <= self.tolerance

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        """Yield the report: the verdict, the loss, and the largest gradient differences."""
        verdict = "equal to eager" if self.ok else "NOT equal to eager"
        kind = str(self.precision).removeprefix("torch.")
        yield f"streamfx: {verdict}; largest relative difference {self.max_error:.1e}, tolerance {self.tolerance:.0e} ({kind})"
        yield f"  loss {self.loss:.10g} in eager, {self.streamed_loss:.10g} with streambp, difference {self.loss_error:.1e}"
        yield from dict.fromkeys(f"  ran: {', '.join(filter(None, (record.streams, record.rows)))}" for record in self.records)
        if self.adjoints != "exact" and not self.ok:
            yield f"  gradients of recurrences are truncated by adjoints={self.adjoints}, so they differ from eager"
        if self.not_chunked:
            yield f"  {self.not_chunked}"
        if not self.errors:
            yield "  nothing requires a gradient"
            return
        worst = sorted(self.errors, key=lambda name: -self.errors[name])
        width = max(len(name) for name in ["gradient of", *worst[:MAX_SHOWN]])
        yield f"  {'gradient of':<{width}}  difference   norm in eager"
        for name in worst[:MAX_SHOWN]:
            yield f"  {name:<{width}}  {self.errors[name]:10.1e}   {self.norms[name]:13.4g}"
        if len(worst) > MAX_SHOWN:
            yield f"  and {len(worst) - MAX_SHOWN} more, none larger"


def relative_difference(value: Tensor | None, truth: Tensor | None, floor: float) -> float:
    """Return norm(value - truth) / max(norm(truth), floor). None, a missing gradient, counts as zeros.

    Equal infinities and NaNs at the same position count as equal, and as zero in norm(truth). Infinite if only one of the two
    has one, or if the divisor is zero and the difference is not.
    """
    if value is None or truth is None:
        difference = _norm(truth if value is None else value)
    else:
        wide = value.to(torch.promote_types(value.dtype, torch.float64))
        is_same = (wide == truth) | (wide.isnan() & truth.isnan())
        difference = _norm(torch.where(is_same, 0.0, wide - truth))
    if difference == 0:
        return 0.0
    scale = max(_norm(_finite(truth)), floor)
    return difference / scale if scale and math.isfinite(difference) else math.inf


def _finite(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor with infinities and NaN replaced by zero; None for None."""
    return None if tensor is None else tensor.nan_to_num(0.0, 0.0, 0.0)


def _norm(tensor: Tensor | None) -> float:
    """Return the Euclidean norm of a tensor in at least double precision; 0 if there is none."""
    if tensor is None:
        return 0.0
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.promote_types(tensor.dtype, torch.float64)))


def gradient_sources(model: Callable[..., Any], inputs: Any) -> dict[str, Tensor]:
    """Return the parameters and inputs that require gradients, by name: `weight`, `input [0]`.

    A tensor with several names, such as a tied weight, is listed once, under its first name.
    """
    tensors: dict[str, Tensor] = {**parameters_of(model)}
    for path, value in tree_flatten_with_path(inputs)[0]:
        if isinstance(value, Tensor):
            tensors[f"input {keystr(path[1:])}"] = value
    distinct = {id(tensor): name for name, tensor in reversed(tensors.items()) if tensor.requires_grad}
    return {name: tensors[name] for name in reversed(distinct.values())}


def default_loss(output: Any) -> Tensor:
    """Return the scalar to differentiate: `output.loss`, the output if it is a scalar, or a fixed random sum of its tensors.

    Raises:
        NotComparableError: if the output holds no floating point tensor.
    """
    model_loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(model_loss, Tensor) and model_loss.numel() == 1:
        return model_loss
    if isinstance(output, Tensor) and output.dim() == 0:
        return output
    tensors = [tensor for tensor in tensors_returned(output) if tensor.is_floating_point()]
    found, do = (
        f"the output, {_type_text(output)}, has no loss",
        "give loss=, a function that returns the number to differentiate",
    )
    require(bool(tensors), NotComparableError, REQUIREMENT, found, do)
    total = tensors[0].new_zeros(())
    for seed, tensor in enumerate(tensors):  # elements times random weights, divided by the square root of their number
        generator = torch.Generator(tensor.device).manual_seed(seed)
        weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device=tensor.device)
        total = total + (tensor * weights.to(tensor.dtype)).sum() / max(tensor.numel(), 1) ** 0.5
    return total


def lowest_precision(compilations: Sequence[Compilation], tensors: Any) -> torch.dtype:
    """Return the least precise floating point dtype among the values of all graphs and `tensors`; float32 if there is none."""
    joint_graphs = [facts.joint.graph for compilation in compilations for facts in compilation.facts]
    values = [node.meta.get(VALUE) for graph in joint_graphs for node in graph.nodes]
    # Graphs that are not chunked have no facts, only Dynamo's values.
    values += [node.meta.get(EXAMPLE_VALUE) for compilation in compilations for node in compilation.module.graph.nodes]
    dtypes = {value.dtype for value in (*values, *tensors) if isinstance(value, Tensor) and value.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def _check_arguments(model: Any, loss: Any, tensors: Sequence[Tensor]) -> None:
    """Refuse a model or loss that is not callable, a class, parameters that ZeRO-3 has partitioned, and fake or meta tensors."""
    refuse = partial(require, error=NotComparableError, asked=REQUIREMENT)
    type_text = _type_text(model)
    refuse(callable(model), found=f"{type_text}, which cannot be called", do="give a model, or a function of one")
    # torch.compile would modify a class permanently.
    class_text = f"a class ({getattr(model, '__name__', '')}), not an instance"
    refuse(not isinstance(model, type), found=class_text, do="pass a model: Model(...), not Model")
    do = "give a function from the output to a tensor with one element"
    refuse(loss is None or callable(loss), found=f"loss is {_type_text(loss)}", do=do)
    refuse_partitioned(parameters_of(model).values())
    without_data = next((tensor for tensor in tensors if isinstance(tensor, FakeTensor) or tensor.is_meta), None)
    do = "give real tensors, or use streamfx.explain, which needs none"
    refuse(without_data is None, found=f"{_type_text(without_data)} holds no data", do=do)


def _type_text(value: Any) -> str:
    """Return the type of a value, and the shape of a tensor, for error messages: `a Tensor of shape (2, 8)`, `a dict`."""
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"{with_article(type(value).__name__)}{shape}"


def has_drawn(states_before: Sequence[Tensor]) -> bool:
    """Return whether random numbers were drawn since `generator_states()` returned these states."""
    return any(not torch.equal(a, b) for a, b in zip(states_before, generator_states(), strict=True))


def generator_states() -> list[Tensor]:
    """Return the states of the random generators of the CPU and of all CUDA devices in use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]
