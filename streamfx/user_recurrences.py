"""Operators with a state of the user's own: which argument is the state, and which result is what is left of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from streamfx.errors import RuleError
from streamfx.ir.stateful import Stateful
from streamfx.passes.operators.rules.registry import RULES
from streamfx.passes.operators.rules.stateful import BACKWARDS, STATEFUL
from streamfx.torch_private import OpOverload
from streamfx.user_rules import overload_of

TENSORS = ("Tensor", "Optional[Tensor]")


def register_recurrence(
    operator: Any,
    backward: Any,
    *,
    rows: Mapping[str, int],
    results: Sequence[int | None],
    states: Mapping[str, int],
    cotangents: Mapping[str, int],
    gradients: Sequence[str | None],
    saved: Mapping[str, int] | None = None,
    always: Mapping[str, Any] | None = None,
    counts: Collection[str] = (),
    block: int = 1,
) -> None:
    """Tell streamfx where an operator of your own has its state, so that it streams: a chunk of rows begins with the state that
    the chunk before it left, and the backward of a chunk with the gradient of the state that the chunk after it left.

    The operator is `torch.library`'s, and so is its backward, which gets the gradient of the state after the last row and gives
    that of the state before the first. It runs on a chunk's rows as on any others; what is no tensor is given to it as in the
    call that is streamed. That a call without a state begins with zeros, and that two halves, the state handed over, give what
    all rows give, is your word: `streamfx.check_recurrence` looks whether it holds. What is declared holds for what is compiled
    afterwards.

    Args:
        operator: what `torch.library.custom_op` returned, or `torch.ops.<namespace>.<name>` (with an overload of several).
        backward: the operator that gives its gradients. Arguments of it that are the operator's own bear the same names.
        rows: the operator's arguments that have rows, each with the dimension that rows run along. All others are given whole,
            and their gradients are summed over rows.
        results: the dimension that rows run along of each of the operator's results; None of one without rows.
        states: the operator's arguments that are states before the first row, each with the number of the result that is this
            state after the last row. A state may be left out of a call (None), which then begins with zeros.
        cotangents: the backward's arguments that are gradients of results, each with the number of the result.
        gradients: for each result of the backward, of which argument of the operator it is the gradient; None of one that is not.
        saved: the backward's arguments that are results of the operator, each with its number. One without rows (a state for
            each block of rows, say) is made again for the rows of each chunk.
        always: arguments of either that have to have a value for the operator to give its last state, and the backward the
            gradient of the first: flags such as `{"output_final_state": True}`.
        counts: arguments that are the number of rows.
        block: where the operator takes rows in blocks, and its state is one only behind whole blocks, how many rows these have.

    Raises:
        RuleError: one of both is no operator, is declared already, or writes into its arguments; a name is not in its schema, or
            there twice; a state has no gradient.

    Example:
        >>> import torch, streamfx
        >>> from torch import Tensor
        >>> @torch.library.custom_op("streamfx_docs::decayed", mutates_args=())
        ... def decayed(x: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        ...     sums = [first]
        ...     for row in x.unbind(1):
        ...         sums.append(0.5 * sums[-1] + row)
        ...     return torch.stack(sums[1:], 1), sums[-1].clone()
        >>> @torch.library.custom_op("streamfx_docs::decayed_backward", mutates_args=())
        ... def decayed_backward(dy: Tensor, dlast: Tensor) -> tuple[Tensor, Tensor]:
        ...     made, carried = [], dlast
        ...     for row in reversed(dy.unbind(1)):
        ...         made.append(carried + row)
        ...         carried = 0.5 * made[-1]
        ...     return torch.stack(made[::-1], 1), carried.clone()
        >>> streamfx.register_recurrence(
        ...     decayed,
        ...     decayed_backward,
        ...     rows={"x": 1},
        ...     results=(1, None),
        ...     states={"first": 1},
        ...     cotangents={"dy": 0, "dlast": 1},
        ...     gradients=("x", "first"),
        ... )
        >>> streamfx.check_recurrence(decayed, {"x": torch.randn(2, 7, 3), "first": torch.randn(2, 3)})
    """
    asked = f"a recurrence of {operator}"
    own, other = overload_of(operator, asked), overload_of(backward, f"{asked} with the backward {backward}")
    declared = Stateful(
        name=own.name().replace("::", "_"),
        forward=own,
        backward=other,
        takes=tuple(argument.name for argument in own._schema.arguments),
        backward_takes=tuple(argument.name for argument in other._schema.arguments),
        rows=dict(rows),
        results=tuple(results),
        states=dict(states),
        cotangents=dict(cotangents),
        gradients=tuple(gradients),
        saved=dict(saved or {}),
        always=dict(always or {}),
        counts=frozenset(counts),
        block=block,
    )
    _Declaration(declared, own, other, asked).check()
    STATEFUL[own], BACKWARDS[other] = declared, declared


class _Declaration:
    """What is said of two operators, to be held against their schemas."""

    def __init__(self, said: Stateful, own: OpOverload[Any, Any], other: OpOverload[Any, Any], asked: str) -> None:
        self.said, self.own, self.other, self.asked = said, own, other, asked

    def check(self) -> None:
        for operator in (self.own, self.other):
            self._check_operator(operator)
        self._check_forward()
        self._check_backward()
        self._check_options()

    def _check_operator(self, operator: OpOverload[Any, Any]) -> None:
        is_there = operator in RULES or operator in STATEFUL or operator in BACKWARDS
        self._needs(not is_there, f"{operator} has a rule already", "leave it: rules that are there are tested")
        self._needs(
            not operator._schema.is_mutable,
            f"{operator} writes into its arguments: {operator._schema}",
            "wrap it in an operator that returns what it writes (mutates_args=())",
        )
        lists = [argument.name for argument in operator._schema.arguments if "List[Tensor]" in str(argument.type)]
        self._needs(not lists, f"{operator} takes lists of tensors: {', '.join(lists)}", "give it each as an argument of its own")

    def _check_forward(self) -> None:
        said, count = self.said, len(self.own._schema.returns)
        self._are_tensors("rows", said.rows, self.own)
        self._are_tensors("states", said.states, self.own)
        self._needs(bool(said.rows), "no argument with rows", "name those that have rows, and the dimension: rows={'x': 1}")
        self._needs(bool(said.states), "no state", "an operator without one takes a rule: streamfx.register_rule")
        both = sorted(set(said.rows) & set(said.states))
        self._needs(not both, f"{', '.join(both)} among rows and among states", "a state has no rows")
        self._needs(
            len(said.results) == count, f"{len(said.results)} entries in results", f"write one for each of its {count} results"
        )
        self._are_numbers("states", said.states, count)
        with_rows = [name for name, number in said.states.items() if said.results[number] is not None]
        self._needs(not with_rows, f"the last {', '.join(with_rows)} has rows", "a state has none: write None in results")
        dims = [*said.rows.values(), *(dim for dim in said.results if dim is not None)]
        self._needs(all(type(dim) is int for dim in dims), f"dimensions {dims}", "give each as a number")

    def _check_backward(self) -> None:
        said, count = self.said, len(self.other._schema.returns)
        for what, names in (("cotangents", said.cotangents), ("saved", said.saved)):
            self._are_tensors(what, names, self.other)
            self._are_numbers(what, names, len(said.results))
            own = sorted(set(names) & set(said.takes))
            self._needs(not own, f"{', '.join(own)} in {what}, a name of the operator's own", "give it a name of its own")
        self._needs(
            len(said.gradients) == count,
            f"{len(said.gradients)} entries in gradients",
            f"write one for each of its {count} results",
        )
        named = [name for name in said.gradients if name is not None]
        self._are_tensors("gradients", named, self.own)
        self._needs(len({*named}) == len(named), f"gradients {named}, one of them twice", "name each argument once")
        unknown = [name for name in tensors_of(self.other) if name not in (*said.takes, *said.cotangents, *said.saved)]
        self._needs(
            not unknown,
            f"{', '.join(unknown)} of the backward, of which nothing is said",
            "name it as the operator does, or say what it is in cotangents or saved",
        )
        for name, number in said.states.items():
            self._needs(name in named, f"the backward gives no gradient of {name}", "a chunk hands it to the chunk before it")
            self._needs(
                number in said.cotangents.values(),
                f"the backward takes no gradient of result {number}, the last {name}",
                "a chunk is given it by the chunk after it",
            )
        with_rows = [name for name, number in said.cotangents.items() if said.results[number] is not None]
        with_rows += [name for name in said.backward_takes if name in said.rows]
        self._needs(
            bool(with_rows), "no argument of the backward has rows", "say of which results it takes gradients: cotangents"
        )

    def _check_options(self) -> None:
        said = self.said
        takes = {*said.takes, *said.backward_takes}
        tensors = {
            argument.name
            for operator in (self.own, self.other)
            for argument in operator._schema.arguments
            if str(argument.type) in TENSORS
        }
        for what, names in (("always", said.always), ("counts", said.counts)):
            unknown = sorted(name for name in names if name not in takes - tensors)
            self._needs(
                not unknown, f"{', '.join(unknown)} in {what}", f"name arguments that are no tensors: {sorted(takes - tensors)}"
            )
        self._needs(type(said.block) is int and said.block > 0, f"block={said.block!r}", "give a number of rows, 1 or more")

    def _are_tensors(self, what: str, names: Iterable[str], operator: OpOverload[Any, Any]) -> None:
        known = tensors_of(operator)
        unknown = [name for name in names if name not in known]
        self._needs(
            not unknown, f"{', '.join(map(str, unknown))} in {what}", f"name tensors that {operator} takes: {', '.join(known)}"
        )

    def _are_numbers(self, what: str, numbers: Mapping[str, int], count: int) -> None:
        values = list(numbers.values())
        wrong = [number for number in values if type(number) is not int or not 0 <= number < count]
        self._needs(not wrong, f"results {wrong} in {what}", f"the operator has results 0 to {count - 1}")
        self._needs(len({*values}) == len(values), f"{what} {dict(numbers)}, a result twice", "name each result once")

    def _needs(self, holds: bool, found: str, do: str) -> None:
        if not holds:
            raise RuleError(self.asked, found=found, do=do)


def tensors_of(operator: OpOverload[Any, Any]) -> list[str]:
    """The arguments of an operator that are tensors, or may be."""
    return [argument.name for argument in operator._schema.arguments if str(argument.type) in TENSORS]
