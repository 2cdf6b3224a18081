"""Which argument of a model is ids? The one that it looks up in a table: seen by running it on fake tensors, not by its name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from streamfx.errors import ModelError, told
from streamfx.tools.inspect.eager import accepting_real, faker_of
from streamfx.tools.inspect.side_effect_guard import modules_of, original, untouched
from streamfx.torch_private.dynamo import quiet_tracer

LABELS = ("labels", "label", "targets", "target")  # what a forward calls the ids that it is to predict
TABLES = {F.embedding: (0, 1), torch.embedding: (1, 0), Tensor.__getitem__: (1, 0)}  # where ids stand, and where the table does
SMALL = (1, 4)  # of the ids that it is run on
GIVE = "return (model, {...}) with the arguments of the call: "


class _LookupRecorder(TorchFunctionMode):
    """Notes the rows of the tables in which some ids, or a view of them, are looked up."""

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.memory, self.rows = ids.untyped_storage(), list[int]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        at, of = TABLES.get(function, (0, 0))
        if at != of and len(args) > 1 and all(isinstance(value, Tensor) for value in args[:2]):
            ids, table = args[at], args[of]
            if ids.untyped_storage()._cdata == self.memory._cdata and table.is_floating_point():
                self.rows.append(table.shape[0])
        return function(*args, **(kwargs or {}))


def arguments_of(model: Callable[..., Any], name: str, batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Drawn ids as the arguments of a model that says nothing of them: for the one that it looks up, and for labels."""
    refused = functools.partial(ModelError, f"{name} returned a model without arguments")
    found: dict[str, int] = {}
    why = ""
    for ids, given in _ways(model):
        try:
            rows = _rows_looked_up(model, ids, given)
        except Exception as error:
            why = why or f"{', '.join(given) or 'one argument'} of ids is not what it takes: {told(error)}"
            continue
        if rows:
            found[ids] = min(rows)
    if len(found) > 1:
        raise refused(found=type(model).__name__, do=f"{GIVE}{' and '.join(found)} are both looked up in tables")
    if not found:
        why = _missing(model) or why or "no argument of it is looked up in a table of ids as it is"
        raise refused(found=type(model).__name__, do=f"{GIVE}{why}")
    (ids, rows_of_table), labels = found.popitem(), _labels(model)
    vocabulary = min(rows_of_table, getattr(getattr(model, "config", None), "vocab_size", rows_of_table))
    drawn = torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
    return ((drawn,), dict.fromkeys(labels, drawn)) if ids.startswith("*") else ((), dict.fromkeys((ids, *labels), drawn))


def _parameters(model: Callable[..., Any]) -> list[inspect.Parameter]:
    """What a call of the model may be given: of a `functools.partial`, what it has not given itself."""
    model = original(model)
    if isinstance(model, functools.partial):
        bound = functools.partial(getattr(model.func, "forward", model.func), *model.args, **model.keywords)
        return [one for name, one in inspect.signature(bound).parameters.items() if name not in model.keywords]
    return list(inspect.signature(getattr(model, "forward", model)).parameters.values())


def _labels(model: Callable[..., Any]) -> list[str]:
    return [one.name for one in _parameters(model) if one.name in LABELS]


def _missing(model: Callable[..., Any]) -> str:
    """What it cannot be called without, where that is more than ids and labels."""
    named = [one for one in _parameters(model) if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    required = [one.name for one in named if one.default is one.empty and one.name not in LABELS]
    return f"nobody tells what {required[1]!r} is" if len(required) > 1 else ""


def _ways(model: Callable[..., Any]) -> Iterator[tuple[str, list[str]]]:
    """Each argument that may be ids, and all that are given with it: it is the only one that has to be there beside labels."""
    parameters, labels = _parameters(model), _labels(model)
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and one.name not in LABELS]
    required = [one.name for one in named if one.default is one.empty]
    for one in named:
        if required in ([], [one.name]):
            yield one.name, [one.name, *labels]
    if not required:
        yield from ((f"*{one.name}", labels) for one in parameters if one.kind is one.VAR_POSITIONAL)


def _rows_looked_up(model: Callable[..., Any], ids: str, given: list[str]) -> list[int]:
    """Rows of the tables in which this argument is looked up; an error behind that is no matter: labels may have other shapes."""
    model = original(model)
    own, others = torch.zeros(SMALL, dtype=torch.int64), torch.zeros(SMALL, dtype=torch.int64)
    mode, faker = faker_of(model, (own, others), {})
    with accepting_real(mode), mode, untouched(model), quiet_tracer(), torch.no_grad():
        faker.replace(modules_of(model), buffers=True)
        own, others = faker.fake(own), faker.fake(others)
        arguments: Mapping[str, Tensor] = {name: own if name == ids else others for name in given}
        with _LookupRecorder(own) as looked:
            try:
                model(own, **arguments) if ids.startswith("*") else model(**arguments)
            except Exception:
                if not looked.rows:
                    raise
        return looked.rows
