"""Find the argument of a model that takes token ids: the argument that indexes a table when the model runs on fake tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from streamfx.errors import ModelError, describe_error
from streamfx.tools.inspect.eager import tracing_mode
from streamfx.tools.inspect.side_effect_guard import modules_of, original, without_side_effects
from streamfx.torch_private.dynamo import quiet_tracer

LABELS = ("labels", "label", "targets", "target")  # names of forward arguments for the token ids to predict
LOOKUPS = {F.embedding: (0, 1), torch.embedding: (1, 0), Tensor.__getitem__: (1, 0)}  # argument indices of ids and table
PROBE_SHAPE = (1, 4)  # shape of the ids used to probe the model
RETURN_PAIR = "return (model, {...}) with the arguments of the call: "


class _LookupRecorder(TorchFunctionMode):
    """Records the number of rows of each table that the given ids, or a view of them, index."""

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.memory, self.rows = ids.untyped_storage(), list[int]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and record the rows of the table if it is a lookup of the ids."""
        ids_index, table_index = LOOKUPS.get(function, (0, 0))
        if ids_index != table_index and len(args) > 1 and all(isinstance(value, Tensor) for value in args[:2]):
            ids, table = args[ids_index], args[table_index]
            if ids.untyped_storage()._cdata == self.memory._cdata and table.is_floating_point():
                self.rows.append(table.shape[0])
        return function(*args, **(kwargs or {}))


def arguments_of(model: Callable[..., Any], name: str, batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return random ids as arguments for a model without given arguments: for its ids argument, and for its labels."""
    lookup_error = functools.partial(ModelError, f"{name} returned a model without arguments")
    table_rows: dict[str, int] = {}
    reason = ""
    for ids, argument_names in _candidate_calls(model):
        try:
            rows = _rows_looked_up(model, ids, argument_names)
        except Exception as error:
            reason = reason or f"{', '.join(argument_names) or 'one argument'} cannot be token ids: {describe_error(error)}"
            continue
        if rows:
            table_rows[ids] = min(rows)
    if len(table_rows) > 1:
        raise lookup_error(
            found=type(model).__name__, do=f"{RETURN_PAIR}{' and '.join(table_rows)} are both looked up in embedding tables"
        )
    if not table_rows:
        reason = _missing_argument_text(model) or reason or "none of its arguments is looked up in an embedding table"
        raise lookup_error(found=type(model).__name__, do=f"{RETURN_PAIR}{reason}")
    (ids, rows_of_table), labels = table_rows.popitem(), _label_names(model)
    vocabulary = min(rows_of_table, getattr(getattr(model, "config", None), "vocab_size", rows_of_table))
    random_ids = torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
    if ids.startswith("*"):
        return (random_ids,), dict.fromkeys(labels, random_ids)
    return (), dict.fromkeys((ids, *labels), random_ids)


def _parameters(model: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of the model's forward; for a `functools.partial`, those that are not bound."""
    model = original(model)
    if isinstance(model, functools.partial):
        bound = functools.partial(getattr(model.func, "forward", model.func), *model.args, **model.keywords)
        return [parameter for name, parameter in inspect.signature(bound).parameters.items() if name not in model.keywords]
    return list(inspect.signature(getattr(model, "forward", model)).parameters.values())


def _label_names(model: Callable[..., Any]) -> list[str]:
    return [parameter.name for parameter in _parameters(model) if parameter.name in LABELS]


def _missing_argument_text(model: Callable[..., Any]) -> str:
    """Explain which argument is missing if the model requires more than ids and labels; empty otherwise."""
    named = [
        parameter for parameter in _parameters(model) if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    required = [parameter.name for parameter in named if parameter.default is parameter.empty and parameter.name not in LABELS]
    return f"the values of {required[1]!r} are unknown" if len(required) > 1 else ""


def _candidate_calls(model: Callable[..., Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield each argument that may take ids, and all arguments passed with it; besides labels, no other may be required."""
    parameters, labels = _parameters(model), _label_names(model)
    named = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and parameter.name not in LABELS
    ]
    required = [parameter.name for parameter in named if parameter.default is parameter.empty]
    for parameter in named:
        if required in ([], [parameter.name]):
            yield parameter.name, [parameter.name, *labels]
    if not required:
        yield from ((f"*{parameter.name}", labels) for parameter in parameters if parameter.kind is parameter.VAR_POSITIONAL)


def _rows_looked_up(model: Callable[..., Any], ids: str, argument_names: list[str]) -> list[int]:
    """Return the rows of the tables that this argument indexes.

    Errors after a lookup are ignored, because labels may need other shapes.
    """
    model = original(model)
    ids_input, other_input = torch.zeros(PROBE_SHAPE, dtype=torch.int64), torch.zeros(PROBE_SHAPE, dtype=torch.int64)
    inputs = ids_input, other_input
    with tracing_mode(model, inputs, {}) as faker, without_side_effects(model), quiet_tracer(), torch.no_grad():
        faker.replace(modules_of(model), buffers=True)
        ids_input, other_input = faker.fake(ids_input), faker.fake(other_input)
        arguments: Mapping[str, Tensor] = {name: ids_input if name == ids else other_input for name in argument_names}
        with _LookupRecorder(ids_input) as recorder:
            try:
                model(ids_input, **arguments) if ids.startswith("*") else model(**arguments)
            except Exception:
                if not recorder.rows:
                    raise
        return recorder.rows
