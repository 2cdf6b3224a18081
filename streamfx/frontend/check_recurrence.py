"""Check a declared recurrence on sample inputs.

A *recurrence* is an operator over rows (positions of a sequence) that takes a state before the first row and returns one after
the last row. Its declaration (`Stateful`) says which arguments and results have rows, and which are states. In loops over
chunks of rows, each forward chunk starts from the state after the previous chunk, and each backward chunk from the gradient of
the state before the following chunk. These states are stored as bytes (the *carry*).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from streamfx.argument_checks import check_call, describe_value, require
from streamfx.errors import RuleError, describe_error
from streamfx.frontend.register_rules import TENSORS, overload_of
from streamfx.ir.scan_schema import NotStatefulError, Stateful, StatefulPlan, backward_plan, forward_plan
from streamfx.passes.ops.rules.stateful import STATEFUL
from streamfx.runtime.custom_scan import StatefulRecurrence, call_operator, num_rows
from streamfx.torch_private import FakeTensor

MISMATCH = "in chunks of {size} rows, each started from the previous state, {value} differs from the unchunked one by {error:.1e}"
DO = "check rows, results and states of register_recurrence, and block, if the state is valid only after complete blocks"


@check_call(RuleError, "streamfx.check_recurrence(...)")
def check_recurrence(operator: Any, arguments: Mapping[str, Any], chunk_size: int | None = None) -> None:
    """Check on sample inputs that an operator gives the same results in chunks as on all rows.

    Each chunk of rows gets the state after the previous chunk, and each chunk of the backward operator gets the
    gradient of the state before the following chunk. Whether the backward operator computes correct gradients is not
    checked: `torch.autograd.gradcheck` does that.

    Args:
        operator: an operator that was passed to `streamfx.register_recurrence`.
        arguments: the arguments of a call, by name. Small tensors in float64 give the sharpest check.
        chunk_size: rows of a chunk. Default: both the declared block and a third of all rows.

    Raises:
        RuleError: the operator is not declared, the declaration does not hold for these arguments, or a result differs.

    Example:
        >>> import torch, streamfx
        >>> try:
        ...     streamfx.check_recurrence(torch.ops.aten.mm.default, {"self": torch.ones(2, 2), "mat2": torch.ones(2, 2)})
        ... except streamfx.RuleError as error:
        ...     print(error.found)
        it has no declaration
    """
    asked = f"whether {operator} gives the same results in chunks as on all rows"
    declared = STATEFUL.get((overload := overload_of(operator, asked)).name())
    if declared is None:
        raise RuleError(asked, found="it has no declaration", do="call streamfx.register_recurrence(...) first")
    _check_arguments(overload, arguments, asked)
    schema = overload._schema.arguments
    if chunk_size is not None and (type(chunk_size) is not int or chunk_size < 1):
        raise RuleError(asked, found=f"chunk_size={chunk_size!r}", do="give a number of rows, 1 or more")
    call_arguments = {argument.name: arguments.get(argument.name, argument.default_value) for argument in schema}
    detached = {name: value.detach() if isinstance(value, Tensor) else value for name, value in call_arguments.items()}
    try:
        with torch.no_grad():
            _ChunkComparison(declared, detached, chunk_size, asked).check()
    except NotStatefulError as error:
        raise RuleError(asked, found=str(error), do=DO) from error


def _check_arguments(operator: Any, arguments: Any, asked: str) -> None:
    """Check that these are arguments of the operator, by name, and that tensors have data."""
    schema = operator._schema.arguments
    do = f"give a dictionary of the arguments of {operator._schema}, by name"
    require(isinstance(arguments, Mapping), RuleError, asked, f"arguments={describe_value(arguments)}", do)
    if unknown := [str(name) for name in arguments if name not in {argument.name for argument in schema}]:
        raise RuleError(asked, found=f"{', '.join(unknown)} among the arguments", do=f"give the arguments of {operator._schema}")
    required = [
        argument.name for argument in schema if not argument.has_default_value() and not str(argument.type).startswith("Optional")
    ]
    if missing := [name for name in required if name not in arguments]:
        raise RuleError(asked, found=f"no {', '.join(missing)} among the arguments", do=do)
    for argument in schema:
        value = arguments.get(argument.name)
        is_given_tensor = argument.name in arguments and str(argument.type) in TENSORS
        fits = isinstance(value, Tensor) or (value is None and str(argument.type) != "Tensor")
        require(not is_given_tensor or fits, RuleError, asked, f"{argument.name}={describe_value(value)}", do)
        if isinstance(value, Tensor) and (value.is_meta or isinstance(value, FakeTensor)):
            raise RuleError(asked, found=f"{argument.name} holds no data", do="give real tensors: the check compares values")


Chunks: TypeAlias = "list[tuple[Tensor, ...]]"


class _ChunkComparison:
    """Compares an operator and its backward in chunks with the same operators on all rows."""

    size: int
    starts: range

    def __init__(self, declared: Stateful, arguments: Mapping[str, Any], chunk_size: int | None, asked: str) -> None:
        """Run the operator on all rows, and choose the chunk sizes to compare.

        Without `chunk_size`: one row and a third of all rows, each rounded up to the declared block. `asked` is the first line
        of errors. Raise `RuleError` if the operator fails, or if there are too few rows for two chunks.
        """
        self.declared, self.arguments, self.asked = declared, arguments, asked
        result_indices = [i for i, dim in enumerate(declared.results) if dim is not None or i in declared.states.values()]
        try:
            self.plan, self.fake_results = forward_plan(declared, _on_meta(arguments), result_indices)
            self.results = call_operator(self.plan, arguments)
        except NotStatefulError:
            raise
        except Exception as error:
            raise RuleError(
                asked, found=f"with these arguments it raises {describe_error(error)}", do="give the arguments of a real call"
            ) from error
        self.length = num_rows(self.plan, arguments)
        self.device = next(result.device for result in self.results if isinstance(result, Tensor))
        block = self.plan.block
        sizes = {-(-size // block) * block for size in ([chunk_size] if chunk_size else [1, -(-self.length // 3)])}
        self.sizes = sorted(size for size in sizes if 0 < size < self.length)
        if not self.sizes:
            do = f"give more than {max(block, chunk_size or 1)} rows: a single chunk passes no state on"
            raise RuleError(asked, found=f"{self.length} rows", do=do)

    def check(self) -> None:
        """Compare chunks with all rows, forward and backward, for each chunk size; raise `RuleError` if they differ."""
        for size in self.sizes:
            self.size, self.starts = size, range(0, self.length, size)
            self.check_chunks()

    def check_chunks(self) -> None:
        """Compare chunks of `self.size` rows with all rows: first the results of the operator, then the results of its backward.

        The forward stores the state before each chunk in `states`, from which the backward recomputes the chunk.
        """
        states = torch.empty(len(self.starts), int(self.plan.carry_size), dtype=torch.uint8, device=self.device)
        forward = StatefulRecurrence(self.plan)
        chunks = self._run(lambda: self._run_chunks(forward, self.arguments, states))
        self._compare(self.plan, _comparable(dict(enumerate(self.results)), self.fake_results), chunks, "result")
        backward_arguments = self._backward_arguments()
        gradient_indices = [i for i, name in enumerate(self.declared.gradients) if name is not None and self._is_tensor(name)]
        plan, fake_gradients = backward_plan(
            self.declared, self.plan, _on_meta(backward_arguments), self.fake_results, gradient_indices
        )
        run = StatefulRecurrence(plan)
        results_of_all_rows = run(*(backward_arguments[name] for name in plan.operands))
        chunks = self._run(lambda: self._run_chunks(run, backward_arguments, states))
        self._compare(
            plan, _comparable(dict(zip(gradient_indices, results_of_all_rows, strict=True)), fake_gradients), chunks, "gradient"
        )

    def _run(self, chunks: Callable[[], Chunks]) -> Chunks:
        """Return the results of `chunks()`; raise a `RuleError` about the declaration if the operator raises an error there."""
        try:
            return chunks()
        except Exception as error:
            problem = f"in chunks of {self.size} rows it raises {describe_error(error)}"
            raise RuleError(self.asked, found=problem, do=DO) from error

    def _is_tensor(self, name: str) -> bool:
        return isinstance(self.arguments[name], Tensor)

    def _backward_arguments(self) -> dict[str, Any]:
        """Return the backward operator's arguments by name.

        They are arguments of the call that both operators take, random gradients of the results, and results of the call that
        the backward takes as saved values, unless each chunk recomputes them.
        """
        declared = self.declared
        draw = torch.Generator().manual_seed(0)
        values = {
            name: self.arguments[name]
            for name in declared.argument_names
            if declared.recomputed_per_chunk or name in declared.backward_argument_names
        }
        values |= dict.fromkeys(declared.counts & set(declared.backward_argument_names), self.length)
        for name, result_index in declared.cotangents.items():
            fake_result = self.fake_results[result_index]
            cotangent = torch.randn(fake_result.shape, generator=draw, dtype=torch.float64)
            values[name] = cotangent.to(self.device, fake_result.dtype)
        return values | {
            name: self.results[index] for name, index in declared.saved.items() if name not in declared.recomputed_per_chunk
        }

    def _run_chunks(self, run: StatefulRecurrence, arguments: Mapping[str, Any], states: Tensor) -> Chunks:
        """Run the operator or its backward chunk by chunk, in its direction; return the results of each chunk, in order of rows.

        `states` has the state before each chunk, as bytes: the operator writes it, the backward reads it.
        """
        carry = torch.zeros(int(run.plan.carry_size), dtype=torch.uint8, device=states.device)
        chunks: dict[int, tuple[Tensor, ...]] = {}
        for i, start in reversed([*enumerate(self.starts)]) if run.reverse else enumerate(self.starts):
            before, after = start, self.length - self._stop(start)
            before, after = (after, before) if run.reverse else (before, after)
            chunks[i] = run.advance(before, after, carry, states, i, *self._operands(run.plan, arguments, start))
        return [chunks[i] for i in range(len(self.starts))]

    def _stop(self, start: int) -> int:
        return min(start + self.size, self.length)

    def _operands(self, plan: StatefulPlan, values: Mapping[str, Any], start: int) -> list[Tensor]:
        """Return the operands of the chunk that begins at row `start`: its rows of values that have rows, other values whole."""
        num_rows = self._stop(start) - start
        return [
            values[name].narrow(plan.row_dims[name], start, num_rows) if name in plan.row_dims else values[name]
            for name in plan.operands
        ]

    def _compare(self, plan: StatefulPlan, truth: Mapping[int, Any], chunks: Sequence[tuple[Tensor, ...]], kind: str) -> None:
        """Raise `RuleError` if the results of chunks, concatenated or summed, differ from the results of all rows.

        `truth` has the results of all rows by index; results that it lacks are not compared. `chunks` has one tuple of results
        per chunk. `kind` is "result" or "gradient", for the message.
        """
        for index, result in enumerate(plan.results):
            if result.index not in truth:
                continue
            chunk_results = [chunk[index] for chunk in chunks]
            computed = (
                torch.cat(chunk_results, result.row_dim) if result.row_dim is not None else torch.stack(chunk_results).sum(0)
            )
            error = _relative(computed, truth[result.index])
            tolerance = torch.finfo(computed.dtype).eps ** 0.5 if computed.is_floating_point() or computed.is_complex() else 0.0
            if not error <= tolerance:
                name = self.declared.gradients[result.index] if kind == "gradient" else result.index
                found = MISMATCH.format(size=self.size, value=f"{kind} {name}", error=error)
                raise RuleError(self.asked, found=found, do=DO)


def _on_meta(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments on the meta device, which keeps only their shapes and dtypes."""
    return {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in arguments.items()}


def _comparable(truth: Mapping[int, Any], fake_results: Sequence[Any]) -> dict[int, Tensor]:
    """Return the results of all rows, by index, without those whose shape differs from the result of a chunk.

    They are not comparable: a call may omit the first state, or not request the last one.
    """
    return {index: value for index, value in truth.items() if value is not None and value.shape == fake_results[index].shape}


def _relative(computed: Tensor, truth: Tensor) -> float:
    """Return norm(computed - truth) / norm(truth); the absolute distance if `truth` is zero, infinity for different shapes."""
    if computed.shape != truth.shape:
        return float("inf")
    wide = torch.complex128 if truth.is_complex() else torch.float64
    distance, norm = float((computed.to(wide) - truth.to(wide)).norm()), float(truth.to(wide).norm())
    return distance / norm if norm else distance
