"""Ways of calling a compiled model: from several threads, with several lengths, after changes of buffers or weights, with hooks.

Each compares with eager calls of a copy, and returns the errors.
"""

import copy
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import numpy as np  # noqa: F401  (in tests/tables)
import torch
from torch import Tensor, nn

import streamfx
from streamfx.options import resolve_options
from tests.support.exactness import Outcome, Reduce, Report, assert_small, errors, fresh, outcome, recorder, relative_error
from tests.support.splits import split_at
from tests.support.tables import named_cases

THREADS, STEPS = 3, 4


@dataclass(frozen=True)
class Called:
    """A model, its compiled copy, and their inputs."""

    eager: nn.Module
    own: nn.Module
    function: Callable[..., Any]
    inputs: dict[str, Tensor]
    reduce: Reduce
    tolerance: float

    def same(self, title: str, inputs: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        """One step of both."""
        given = self.inputs if inputs is None else inputs
        truth = outcome(self.eager, self.eager, given, self.reduce)
        got = outcome(self.function, self.own, given, self.reduce)
        if not all(bool(item.isfinite().all()) for item in truth.outputs.values()):
            return {}  # rows without a key at a shorter length, for example: nothing to compare
        found = errors(got, truth)
        assert_small(found, self.tolerance, title)
        return found


def compare_called(
    way: str, model: nn.Module, inputs: dict[str, Tensor], *, reduce: Reduce, tolerance: float, also: Any, **options: Any
) -> Report:
    """Assert that a way of calling a model has eager's results, or a documented error."""
    torch._dynamo.reset()
    own = copy.deepcopy(model)
    function = torch.compile(own, backend="streambp", options=options)
    called = Called(copy.deepcopy(model), own, function, inputs, reduce, tolerance)
    first, _, rest = way.partition(" ")
    found = WAYS[first](called, rest)
    return Report(found, recorder())


# -- threads, lengths, options


def _threads(called: Called, rest: str) -> dict[str, float]:
    """Threads share the model, not the inputs; gradients are returned, not accumulated."""
    called.same("before threads")
    own = [{name: _shuffled(item, n) for name, item in called.inputs.items()} for n in range(THREADS)]
    truth = [gradients_of(called.eager, called.eager, given, called.reduce) for given in own]
    found: dict[str, float] = {}

    def work(n: int) -> None:
        for step in range(STEPS):
            try:
                got = gradients_of(called.function, called.own, own[n], called.reduce)
                found[f"thread {n} step {step}"] = max(errors(Outcome({}, got), Outcome({}, truth[n])).values())
            except Exception as error:
                found[f"thread {n} step {step}: {type(error).__name__} {error}"[:300]] = float("inf")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_small(found, called.tolerance, "threads")
    return found


def gradients_of(
    function: Callable[..., Any], model: nn.Module, inputs: Mapping[str, Tensor], reduce: Reduce
) -> dict[str, Tensor | None]:
    named = {name: item for name, item in model.named_parameters() if item.requires_grad}
    found = torch.autograd.grad(reduce(function(**fresh(inputs))), [*named.values()], allow_unused=True)
    return dict(zip(named, found, strict=True))


def _shuffled(item: Tensor, n: int) -> Tensor:
    return item if n == 0 else item.flatten().roll(n).view_as(item)


def _lengths(called: Called, rest: str) -> dict[str, float]:
    """A dynamic length; inputs are [b t]."""
    found = called.same("first length")
    for cut in (1, 2):
        shorter = {name: item[..., : item.shape[-1] - cut] for name, item in called.inputs.items()}
        if all(item.numel() and item.shape[-1] > 1 for item in shorter.values()):
            found = called.same(f"shorter by {cut}", shorter)
    return found


def _configured(called: Called, rest: str) -> dict[str, float]:
    """Two threads enter and leave options in turn; the options of the calling thread do not change."""
    before, entered, left = resolve_options({}), threading.Event(), threading.Event()

    def work() -> None:
        with streamfx.configure(chunk_size=1):
            entered.set()
            left.wait()

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait()
    with streamfx.configure(chunk_size=2):
        left.set()
        thread.join()
        found = called.same("configured")
    assert resolve_options({}) == before, "options are still set"
    return found


# -- buffers of masks that change between two calls


def _buffer(called: Called, way: str) -> dict[str, float]:
    called.same("before the change")
    for model in (called.own, called.eager):
        for name, buffer in list(model.named_buffers()):
            if name.startswith("tril"):
                new = torch.ones_like(buffer).tril(2)
                CHANGES[way](model, name, new)
    return called.same("after the change")


def _in_place(model: nn.Module, name: str, new: Tensor) -> None:
    with torch.no_grad():
        getattr(model, name).copy_(new)


CHANGES: dict[str, Callable[[nn.Module, str, Tensor], Any]] = named_cases("changes", globals(), "model, name, new")


# -- logits that are read after their weights have changed


def _late(called: Called, way: str) -> dict[str, float]:
    called.same("before the change")
    called.own.zero_grad(set_to_none=True)
    called.reduce(called.function(**called.inputs)).backward()
    truth = called.eager(**called.inputs).detach().clone()
    logits = called.function(**called.inputs)
    _changed(called.own, way)
    try:
        found = {"logits read late": relative_error(logits.detach() * 1.0, truth)}
    except streamfx.StaleOutputError:
        return {"refused": 0.0}
    assert_small(found, called.tolerance, way)
    return found


def _changed(model: nn.Module, way: str) -> None:
    trained = [item for item in model.parameters() if item.grad is not None]
    if way in ("optimizer", "fused"):
        torch.optim.AdamW(trained, lr=0.1, fused=way == "fused").step()
        return
    for name, _ in list(model.named_parameters()):
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        CHANGES[way](module, own, torch.full_like(getattr(module, own), 0.5))


# -- single rows of logits


def _rows(called: Called, rest: str) -> dict[str, float]:
    """Each way of reading is the first use of a call's logits, once without and once with gradients.

    Norms of rows that almost vanish magnify rounding; the values of another row are wrong by far more.
    """
    called = replace(called, tolerance=1e-9)
    found = called.same("all logits")
    dims = range(called.eager(**called.inputs).dim() - 1)
    for name, read in ((f"{name} of {dim}", partial(read, dim)) for dim in dims for name, read in READS.items()):
        found |= {f"{name}: {value}": error for value, error in _read(called, read).items()}
    assert_small(found, called.tolerance, "single rows")
    return found


def _read(called: Called, read: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Errors of the rows of a call, and of the gradients of another call, relative to at least 1e-3."""

    def gradients(function: Callable[..., Any], model: nn.Module) -> dict[str, Tensor | None]:
        return gradients_of(function, model, called.inputs, lambda logits: _weighted(read(logits)))

    with torch.no_grad():
        rows, truth = (read(function(**called.inputs)) * 1.0 for function in (called.function, called.eager))
    found = {"value": relative_error(rows, truth, 1e-3)}
    own, wanted = gradients(called.function, called.own), gradients(called.eager, called.eager)
    for name, gradient in wanted.items():
        got = own[name]
        if got is None or gradient is None:
            found[name] = 0.0 if got is gradient else float("inf")
        else:
            found[name] = relative_error(got, gradient, 1e-3)
    return found


def _weighted(rows: Tensor) -> Tensor:
    return (rows * torch.arange(1.0, rows.numel() + 1, dtype=rows.dtype).view(rows.shape).cos()).sum()


READS: dict[str, Callable[[int, Tensor], Tensor]] = named_cases("single rows", globals(), "dim, logits")


# -- hooks that run between two segments of a backward graph


def _stages(called: Called, way: str) -> dict[str, float]:
    """Hooks write to a gradient and its parameter as soon as the gradient is there."""
    own, truth = (
        _hooked(function, model, called, HOOKS[way])
        for function, model in ((called.function, called.own), (called.eager, called.eager))
    )
    found = errors(own, truth)
    assert_small(found, called.tolerance, way)
    return found


def _hooked(function: Callable[..., Any], model: nn.Module, called: Called, hook: Callable[[Tensor], None]) -> Outcome:
    """Parameters, inputs and gradients after two steps; the second adds to gradients of the first."""
    leaves = dict(model.named_parameters())
    _hook(leaves, hook)
    for number in range(2):
        given = fresh({name: _shuffled(item, number) for name, item in called.inputs.items()})
        _hook(given, hook)
        called.reduce(function(**given)).backward()
        leaves |= {f"{name} of step {number}": item for name, item in given.items()}
    return Outcome({name: item.detach() for name, item in leaves.items()}, {name: item.grad for name, item in leaves.items()})


def _hook(leaves: Mapping[str, Tensor], hook: Callable[[Tensor], None]) -> None:
    for leaf in leaves.values():
        if leaf.requires_grad:
            leaf.register_post_accumulate_grad_hook(hook)


def _updated(parameter: Tensor) -> None:
    if parameter.grad is not None:  # an unused weight: torch calls the hook if a function is compiled
        parameter.data -= 0.1 * parameter.grad
        parameter.grad.zero_()  # no other code may read it later
        parameter.grad = None


def _added(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad += 1


HOOKS: dict[str, Callable[[Tensor], None]] = {"optimizer": _updated, "added": _added}


def _split(called: Called, rest: str) -> dict[str, float]:
    """The graph is split in two at a random place."""
    with split_at(Random(int(rest)).choice):
        return called.same(f"split by {rest}")


WAYS: dict[str, Callable[[Called, str], dict[str, float]]] = named_cases("ways", globals())
