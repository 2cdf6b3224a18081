"""Declarations that `register_recurrence` refuses, calls that fall back, and the checks of a declaration."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional

import streamfx
from streamfx.passes.ops.opaque import describe_opaque
from streamfx.passes.ops.rules.stateful import BACKWARDS, STATEFUL
from tests.support.exactness import compare
from tests.support.mixers import Mixed, Mixer, compared
from tests.support.stateful.averages import averages
from tests.support.stateful.blocks import blocks
from tests.support.stateful.selective import selective, selective_backward
from tests.support.stateful.windows import windows
from tests.support.tables import listed_cases, named_cases, read
from tests.test_stateful import attended, selected

# -- declarations

T = Tensor


@torch.library.custom_op("streamfx_tests::undeclared", mutates_args=())
def undeclared(x: T, weight: T, first: T | None, rows: int, asks: bool) -> tuple[T, T, T]:
    return x.clone(), x.clone(), x.clone()


@torch.library.custom_op("streamfx_tests::undeclared_backward", mutates_args=())
def undeclared_backward(dy: T, dlast: T, x: T, weight: T, first: T | None, kept: T, rows: int) -> tuple[T, T, T]:
    return x.clone(), x.clone(), x.clone()


@torch.library.custom_op("streamfx_tests::writing", mutates_args=("y",))
def writing(x: T, y: T) -> None:
    y.copy_(x.cumsum(1))


@torch.library.custom_op("streamfx_tests::listing", mutates_args=())
def listing(x: list[T], first: T) -> tuple[T, T]:
    return first.clone(), first.clone()


SOUND: dict[str, Any] = named_cases("a sound declaration", globals())
WRONG = read(Path(__file__).parent / "support" / "wrong_recurrences.txt", 2)[""]


@pytest.mark.parametrize(("changes", "says"), WRONG, ids=[says for _, says in WRONG])
def test_wrong_declarations_are_refused(changes: str, says: str) -> None:
    refused(undeclared, undeclared_backward, SOUND | eval(f"dict({changes})"), says)


UNDECLARABLE: list[tuple[Any, Any, str]] = listed_cases("operators without recurrences", globals())


@pytest.mark.parametrize(
    ("own", "backward", "says"),
    UNDECLARABLE,
)
def test_operators_without_recurrences_are_refused(own: Any, backward: Any, says: str) -> None:
    refused(own, backward, SOUND, says)


def refused(own: Any, backward: Any, how: dict[str, Any], says: str) -> None:
    before = dict(STATEFUL), dict(BACKWARDS)
    with pytest.raises(streamfx.RuleError, match=says):
        streamfx.register_recurrence(own, backward, **how)
    assert before == (STATEFUL, BACKWARDS)


def test_an_operator_is_declared_once() -> None:
    streamfx.register_recurrence(undeclared, undeclared_backward, **SOUND)
    refused(undeclared, undeclared_backward, SOUND, "already has a rule")
    with pytest.raises(streamfx.RuleError, match="already has a rule"):
        streamfx.register_rule(undeclared, "... d, d -> ... d")


# -- laws


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


ROWS, STATE, HEADS = draw(2, 7, 4), draw(2, 4, 3), draw(2, 11, 2, 3)
SCAN = {"x": ROWS, "dt": ROWS.sigmoid(), "a": -draw(4, 3).exp(), "b": draw(2, 7, 3), "c": draw(2, 7, 3)}
ATTENTION = {"q": HEADS, "k": HEADS.sin(), "v": HEADS.cos(), "g": -HEADS[..., 0].exp(), "scale": 0.5}
CHANNELS = {"x": ROWS.transpose(1, 2), "weight": draw(4, 4)}
AVERAGE = {"count": 7, "k": ROWS, "v": ROWS.sin(), "decay": draw(4).sigmoid()}
SAMPLES: tuple[tuple[Any, dict[str, Any]], ...] = tuple(listed_cases("samples", globals()))


@pytest.mark.parametrize(("operator", "arguments"), SAMPLES)
def test_laws_hold(operator: Any, arguments: dict[str, Any]) -> None:
    for chunk_size in (1, 2, None):
        streamfx.check_recurrence(operator, arguments, chunk_size)


@contextmanager
def declared(operator: Any, **other: Any) -> Iterator[None]:
    """Another declaration of an operator: one that is wrong."""
    own = replace(STATEFUL[operator._opoverload.name()], **other)
    with patch.dict(STATEFUL, {own.operators[0]: own}), patch.dict(BACKWARDS, {own.operators[1]: own}):
        yield


WRONGLY_DECLARED: list[tuple[Any, dict[str, Any], str]] = listed_cases("wrong declarations", globals())


@pytest.mark.parametrize(
    ("operator", "wrong", "says"),
    WRONGLY_DECLARED,
)
def test_a_wrong_declaration_is_found(operator: Any, wrong: dict[str, Any], says: str) -> None:
    arguments = next(given for own, given in SAMPLES[1::2] if own is operator)
    with declared(operator, **wrong), pytest.raises(streamfx.RuleError, match=says):
        streamfx.check_recurrence(operator, arguments, 1)


CHECKED: list[tuple[dict[str, Any], int | None, str]] = listed_cases("checks that prove nothing", globals())


@pytest.mark.parametrize(
    ("change", "chunk_size", "says"),
    CHECKED,
)
def test_a_check_that_proves_nothing_is_refused(change: dict[str, Any], chunk_size: int | None, says: str) -> None:
    """One chunk passes on no state, so any declaration would pass."""
    with pytest.raises(streamfx.RuleError, match=says):
        streamfx.check_recurrence(averages, {**AVERAGE, "top": None, "bottom": None, **change}, chunk_size)


# -- calls that a declaration does not hold for


class Doubled(torch.autograd.Function):
    """Its backward is no backward of any call that is there."""

    @staticmethod
    def forward(ctx: Any, *operands: Tensor) -> Tensor:
        ctx.save_for_backward(*operands)
        return selective(*operands)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, dt, *others = ctx.saved_tensors
        return selective_backward(dy, torch.zeros_like(dy[:, 0, :, None] * others[0]), 2 * x, dt, *others)[:5]


def of_another_backward(m: Mixed, x: Tensor) -> Tensor:
    left, right = m.up(x)[..., :8].chunk(2, -1)
    return m.out(Doubled.apply(x, m.gate(x).sigmoid(), -m.cell.weight_hh[:8, :4].exp(), left, right))


def reading_what_is_saved(m: Mixed, x: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (2, -1)) for part in m.up(x).chunk(3, -1))
    y, _, saved = blocks(q, k, v, -m.gate(x)[..., :2].exp(), 0.5, None, False)
    return m.out(y.flatten(2)) + saved.detach().sum((1, 2, 3, 4))[:, None, None]


def reading_an_empty_state(m: Mixed, x: Tensor) -> Tensor:
    """Nothing is left in place of the last state, and the layer asks how much that is."""
    y, last = attended(m, x)
    return m.out(y.flatten(2)) * (1 + last.detach().sum())


def from_a_wide_state(m: Mixed, x: Tensor) -> Tensor:
    first = m.first.expand(x.shape[0], 8).clone()
    return m.out(averages(x.shape[1], m.gate(x).float(), x.float(), m.mu.float().sigmoid(), first, first.exp())[0].to(x.dtype))


def of_two_biases(m: Mixed, x: Tensor) -> Tensor:
    """The backward has the same operands for both."""
    rows, weight = x.transpose(1, 2), m.cell.weight_ih[:8, :3]
    return m.out((windows(rows, weight, None, None)[0] + windows(rows, weight, m.first, None)[0].sin()).transpose(1, 2))


def writing_rows(m: Mixed, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    writing(x.detach(), y)
    return m.out(x * y)


CALLS: dict[str, tuple[Mixer, str]] = named_cases("calls", globals())


@pytest.mark.compiled
@pytest.mark.parametrize("name", CALLS)
def test_calls_outside_a_declaration_fall_back(name: str) -> None:
    mixer, says = CALLS[name]
    tolerance = 1e-4 if name == "a wide state" else 1e-12
    (facts,) = compared(mixer, chunk_size=4, also=(1,), streams=False, tolerance=tolerance).facts
    assert says in "; ".join(facts.reasons())


@pytest.mark.compiled
def test_operands_with_other_numbers_of_rows_fall_back() -> None:
    """One row for all others."""
    with declared(selective, rows={"x": 1, "dt": 1, "a": 1, "b": 1, "c": 1}):
        (facts,) = compared(lambda m, x: m.out(selected(m, x)[0]), chunk_size=4, streams=False).facts
    assert "different numbers of rows" in "; ".join(facts.reasons())


# -- kernels that are no operators


class Kernel(torch.autograd.Function):
    """As packages have them: a kernel of a C++ extension, which Dynamo does not trace."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        zlib.crc32(b"a kernel")
        return x.cumsum(1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy.flip(1).cumsum(1).flip(1)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def disabled(x: Tensor) -> Tensor:
    return x.cumsum(1)


@pytest.mark.compiled
@pytest.mark.parametrize("kernel", [Kernel.apply, disabled], ids=["an extension", "disabled"])
def test_a_kernel_that_is_no_operator_is_reported(kernel: Any) -> None:
    """It breaks the graph: the result is exact, and the report names the remedy."""

    class Around(torch.nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](kernel(self[0](x))).square().mean()  # type: ignore[no-any-return]

    model, x = Around(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).double(), draw(2, 11, 8).requires_grad_()
    compare(model, {"x": x}, chunk_size=4, streams=None, graphs=None)
    torch._dynamo.reset()
    found = str(streamfx.explain(model, x, chunk_size=4))
    assert "streamfx.register_recurrence if it has a state" in found, found
    assert ("autograd.Function" in found) == (kernel is not disabled), found


def test_a_triton_kernel_is_opaque() -> None:
    node = torch.fx.Graph().call_function(triton_kernel_wrapper_functional, (), {"kernel_idx": 0})
    assert describe_opaque(node) == "triton_kernel_wrapper_functional runs a Triton kernel, and no rule says how it maps rows"
