"""Registration of user-defined operators with a state (recurrences), so that loops can run them on chunks of their rows.

*Rows* are positions of a sequence, along one dimension of a tensor. A *state* is an argument before the first row, and a result
after the last one. Errors have three texts: the request (`asked`), the value found, and the remedy (`do`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from streamfx.argument_checks import check_call, describe_value, did_you_mean
from streamfx.errors import RuleError
from streamfx.frontend.register_rules import TENSORS, has_rule, overload_of
from streamfx.ir.scan_schema import Stateful
from streamfx.passes.ops.rules.stateful import declare
from streamfx.torch_private import OpOverload

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in `typing` since Python 3.11

REQUIRED = ("rows", "results", "states", "cotangents", "gradients")
LIST_CONTENTS = {
    "gradients": "names of the operator's arguments, or None",
    "counts": "names of arguments",
    "results": "dimensions, or None",
}


class ExtraDeclaration(TypedDict, total=False):
    """Options of `register_recurrence` that few operators need; its docstring describes them."""

    saved: Mapping[str, int]
    always: Mapping[str, Any]
    only: Mapping[str, Any]
    counts: Collection[str]
    block: int | str


@check_call(RuleError, "streamfx.register_recurrence(...)")
def register_recurrence(
    operator: Any,
    backward: Any,
    *,
    rows: Mapping[str, int],
    results: Sequence[int | None],
    states: Mapping[str, int],
    cotangents: Mapping[str, int],
    gradients: Sequence[str | None],
    **more: Unpack[ExtraDeclaration],
) -> None:
    """Register where a user-defined operator has its state, so that it can be chunked.

    Each chunk of rows starts with the state after the previous chunk, and the backward of each chunk starts with the
    gradient of the state before the following chunk.

    Both operators are operators of `torch.library`, which run on a chunk's rows as on any other rows. You assert that
    two halves of the rows, with the state passed between them, give the same result as all rows at once.
    `streamfx.check_recurrence` checks this: docs/recurrences.md.

    Args:
        operator: the result of `torch.library.custom_op`, or `torch.ops.<namespace>.<name>` (with its overload).
        backward: the operator that computes its gradients. Arguments that it shares with the operator have the same names.
        rows: arguments that have rows, each with its row dimension. Gradients of other arguments are sums over rows.
        results: for each of the operator's results its row dimension; None for a result without rows.
        states: arguments that are states before the first row, each with the index of the result that is the final state.
        cotangents: the backward's arguments that are gradients of results, each with the index of the result.
        gradients: for each result of the backward, the operator's argument whose gradient it is, or None.
        more: `saved`, the backward's arguments that are results of the operator, by index; `always`, arguments that chunks
            need for a last state, and its gradient; `only`, arguments of the calls to which the declaration applies;
            `counts`, arguments that are the number of rows; `block`, the number of rows processed together, or the
            argument that has it.

    Raises:
        RuleError: the declaration does not fit the schemas of both operators; the error says where.

    Example:
        >>> import torch, streamfx
        >>> from torch import Tensor
        >>> def sums(x: Tensor, w: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        ...     y = (w * x).cumsum(1) + first[:, None]
        ...     return y, y[:, -1].clone()
        >>> def back(dy: Tensor, dlast: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ...     dsums = dy.flip(1).cumsum(1).flip(1) + dlast[:, None]
        ...     return w * dsums, (x * dsums).sum((0, 1)), dsums[:, 0].clone()
        >>> own = [torch.library.custom_op(f"streamfx_docs::{f.__name__}", f, mutates_args=()) for f in (sums, back)]
        >>> _ = [one.register_fake(f) for one, f in zip(own, (sums, back))]
        >>> forward, backward = {"states": {"first": 1}, "results": (1, None)}, {"cotangents": {"dy": 0, "dlast": 1}}
        >>> streamfx.register_recurrence(*own, rows={"x": 1}, **forward, **backward, gradients=("x", "w", "first"))
        >>> streamfx.check_recurrence(own[0], {"x": torch.randn(2, 7, 3), "w": torch.randn(3), "first": torch.randn(2, 3)})
    """
    declaration = _Declaration(operator, backward)
    declaration.check(rows=rows, results=results, states=states, cotangents=cotangents, gradients=gradients, **more)
    declare(declaration.stateful)


class _Declaration:
    """Checks a declaration of two operators against their schemas."""

    stateful: Stateful

    def __init__(self, operator: Any, backward: Any) -> None:
        """Resolve both operators to overloads, as they occur in graphs; raise `RuleError` if they are not operators."""
        self.asked = f"a recurrence of {operator}"
        self.forward_operator = overload_of(operator, self.asked)
        self.backward_operator = overload_of(backward, f"{self.asked}, whose backward is {backward}")

    def check(self, **options: Any) -> None:
        """Check the options of `register_recurrence`, first their types, then whether they fit both operators' schemas.

        Set `self.stateful`, the declaration; raise `RuleError` if an option does not fit.
        """
        for name in ("rows", "states", "cotangents", "saved", "always", "only"):
            option = options.get(name, {})
            is_by_name = isinstance(option, Mapping) and all(isinstance(key, str) for key in option)
            self._require(is_by_name, f"{name}={describe_value(option)}", "give a dictionary, by the names of arguments")
        for name in ("results", "gradients"):
            option = options[name]
            self._require(
                isinstance(option, (list, tuple)), f"{name}={describe_value(option)}", "give a list, one entry for each result"
            )
        for name, kind in (("gradients", str), ("counts", str), ("results", int)):
            option = options.get(name, ())
            is_list = isinstance(option, (list, tuple, set, frozenset))
            fits = is_list and all(type(entry) is kind or (entry is None and name != "counts") for entry in option)
            self._require(fits, f"{name}={describe_value(option)}", f"give a list of {LIST_CONTENTS[name]}")
        unknown = [name for name in options if name not in {*REQUIRED, *ExtraDeclaration.__annotations__}]
        hint = did_you_mean(unknown[0], ExtraDeclaration.__annotations__) if unknown else ""
        self._require(
            not unknown,
            f"{', '.join(unknown)}",
            f"{hint}the optional declarations are {', '.join(ExtraDeclaration.__annotations__)}",
        )
        immutable_options: dict[str, Any] = {name: _own_copy(value) for name, value in options.items()}
        immutable_options["counts"] = frozenset(options.get("counts", ()))
        names = self.forward_operator.name(), self.backward_operator.name()
        self.stateful = Stateful(
            name=names[0].replace("::", "_"),
            operators=names,
            forward=self.forward_operator,
            backward=self.backward_operator,
            argument_names=tuple(argument.name for argument in self.forward_operator._schema.arguments),
            backward_argument_names=tuple(argument.name for argument in self.backward_operator._schema.arguments),
            **immutable_options,
        )
        for operator in (self.forward_operator, self.backward_operator):
            self._check_operator(operator)
        self._check_forward()
        self._check_backward()
        self._check_options()

    def _check_operator(self, operator: OpOverload[Any, Any]) -> None:
        """Raise `RuleError` if an operator has a rule already, writes to an argument, or takes lists of tensors."""
        self._require(not has_rule(operator), f"{operator} already has a rule", "use the existing rule, which is tested")
        self._require(
            not operator._schema.is_mutable,
            f"{operator} writes to its arguments: {operator._schema}",
            "wrap it in an operator that returns the written values (mutates_args=())",
        )
        lists = [argument.name for argument in operator._schema.arguments if "List[Tensor]" in str(argument.type)]
        self._require(
            not lists, f"{operator} takes lists of tensors: {', '.join(lists)}", "pass each tensor as a separate argument"
        )

    def _check_forward(self) -> None:
        """Raise `RuleError` unless `rows`, `states` and `results` fit the schema of the forward operator.

        At least one tensor argument has rows and another is a state; each result has an entry; final states have no rows.
        """
        stateful = self.stateful
        num_results = len(self.forward_operator._schema.returns)
        self._require_tensors("rows", stateful.rows, self.forward_operator)
        self._require_tensors("states", stateful.states, self.forward_operator)
        self._require(
            bool(stateful.rows),
            "no argument with rows",
            "name the arguments that have rows, and their row dimension: rows={'x': 1}",
        )
        self._require(bool(stateful.states), "no state", "for an operator without a state, use streamfx.register_rule")
        in_both = sorted(set(stateful.rows) & set(stateful.states))
        self._require(not in_both, f"{', '.join(in_both)} in rows and in states", "a state has no rows")
        self._require(
            len(stateful.results) == num_results,
            f"{len(stateful.results)} entries in results",
            f"write one entry for each of its {num_results} results",
        )
        self._require_result_indices("states", stateful.states, num_results)
        with_rows = [name for name, index in stateful.states.items() if stateful.results[index] is not None]
        self._require(not with_rows, f"the final {', '.join(with_rows)} has rows", "a state has no rows: write None in results")
        dims = [*stateful.rows.values(), *(dim for dim in stateful.results if dim is not None)]
        self._require(all(type(dim) is int for dim in dims), f"dimensions {dims}", "give each as an integer")

    def _check_backward(self) -> None:
        """Raise `RuleError` unless `cotangents`, `saved` and `gradients` fit the schema of the backward operator.

        Each of its tensor arguments is a cotangent (the gradient of a forward result), a saved forward result, or an argument
        of the forward operator with the same name. It takes the gradient of each final state and returns that of each first
        state, and one of its arguments has rows.
        """
        stateful = self.stateful
        num_results = len(self.backward_operator._schema.returns)
        for option, names in (("cotangents", stateful.cotangents), ("saved", stateful.saved)):
            self._require_tensors(option, names, self.backward_operator)
            self._require_result_indices(option, names, len(stateful.results))
            clashing = sorted(set(names) & set(stateful.argument_names))
            self._require(
                not clashing, f"{', '.join(clashing)} in {option} is also an argument of the forward operator", "rename it"
            )
        in_both = sorted(set(stateful.saved) & set(stateful.cotangents))
        self._require(not in_both, f"{', '.join(in_both)} in cotangents and in saved", "name an argument in one of the two")
        self._require(
            len(stateful.gradients) == num_results,
            f"{len(stateful.gradients)} entries in gradients",
            f"write one entry for each of its {num_results} results",
        )
        named = [name for name in stateful.gradients if name is not None]
        self._require_tensors("gradients", named, self.forward_operator)
        self._require(len({*named}) == len(named), f"gradients {named}, which has a duplicate", "name each argument once")
        unknown = [
            name
            for name in tensors_of(self.backward_operator)
            if name not in (*stateful.argument_names, *stateful.cotangents, *stateful.saved)
        ]
        self._require(
            not unknown,
            f"{', '.join(unknown)} of the backward is not declared",
            "give it the name of an argument of the operator, or declare it in cotangents or saved",
        )
        for name, result_index in stateful.states.items():
            self._require(
                name in named, f"the backward returns no gradient of {name}", "return it: a chunk passes it to the previous chunk"
            )
            self._require(
                result_index in stateful.cotangents.values(),
                f"the backward takes no gradient of result {result_index}, the last {name}",
                "take it: a chunk gets it from the next chunk",
            )
        with_rows = [name for name, index in stateful.cotangents.items() if stateful.results[index] is not None]
        with_rows += [name for name in stateful.backward_argument_names if name in stateful.rows]
        self._require(
            bool(with_rows), "no argument of the backward has rows", "declare in cotangents the results whose gradients it takes"
        )

    def _check_options(self) -> None:
        """Raise `RuleError` unless the options that few operators need (`ExtraDeclaration`) fit the schemas.

        `always` and `counts` name arguments of either operator that are not tensors, `only` names any arguments, and `block` is
        a positive integer or names an argument of the forward operator that is not a tensor.
        """
        stateful = self.stateful
        argument_names = {*stateful.argument_names, *stateful.backward_argument_names}
        tensors = {
            argument.name
            for operator in (self.forward_operator, self.backward_operator)
            for argument in operator._schema.arguments
            if str(argument.type) in TENSORS
        }
        for option, names in (("always", stateful.always), ("counts", stateful.counts), ("only", stateful.only)):
            allowed = argument_names if option == "only" else argument_names - tensors
            unknown = sorted(name for name in names if name not in allowed)
            kind = "arguments" if option == "only" else "arguments that are not tensors"
            self._require(not unknown, f"{', '.join(unknown)} in {option}", f"name {kind}: {sorted(allowed)}")
        is_size = type(stateful.block) is int and stateful.block > 0
        self._require(
            is_size or stateful.block in set(stateful.argument_names) - tensors,
            f"block={stateful.block!r}",
            "give a number of rows, 1 or more, or the argument that holds it",
        )

    def _require_tensors(self, option: str, names: Iterable[str], operator: OpOverload[Any, Any]) -> None:
        """Raise `RuleError` unless all `names` in an option are tensor arguments of the operator."""
        tensor_names = tensors_of(operator)
        unknown = [name for name in names if name not in tensor_names]
        self._require(
            not unknown,
            f"{', '.join(map(str, unknown))} in {option}",
            f"name tensors that {operator} takes: {', '.join(tensor_names)}",
        )

    def _require_result_indices(self, option: str, indices: Mapping[str, int], num_results: int) -> None:
        """Raise `RuleError` unless the values of `indices` (an option: argument -> index of a result) are distinct and valid."""
        values = list(indices.values())
        wrong = [index for index in values if type(index) is not int or not 0 <= index < num_results]
        self._require(not wrong, f"results {wrong} in {option}", f"the operator has results 0 to {num_results - 1}")
        self._require(
            len({*values}) == len(values),
            f"{option} {dict(indices)}, which has a result twice",
            "name each result once",
        )

    def _require(self, holds: bool, found: str, do: str) -> None:
        """Raise `RuleError` with these texts (the value found, the remedy) unless the condition `holds`."""
        if not holds:
            raise RuleError(self.asked, found=found, do=do)


def _own_copy(option: Any) -> Any:
    """Return an option that later changes by the user do not affect: a copy of a mapping, a list as a tuple."""
    if isinstance(option, Mapping):
        return dict(option)
    return tuple(option) if isinstance(option, list) else option


def tensors_of(operator: OpOverload[Any, Any]) -> list[str]:
    """Return the names of an operator's arguments that are tensors, required or optional."""
    return [argument.name for argument in operator._schema.arguments if str(argument.type) in TENSORS]
