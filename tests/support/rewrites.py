"""Graphs that rewrite rules are tried on: those of `rewrites.txt`, with its helpers, and families of them."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from streamfx.dialect.rel_shift import RELATIVE_SHIFT, RELATIVE_SHIFT_BACKWARD
from tests.support.canonical import INF, NAN, Case, Function, plain, scores, special  # noqa: F401  (in tests/tables)
from tests.support.tables import named_cases, read

__all__ = ["RELATIVE_SHIFT", "RELATIVE_SHIFT_BACKWARD", "F"]  # names in rewrites.txt

aten = torch.ops.aten

# -- operands


def tensor(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


X, S, LABELS = special(4, 3), scores(2, 7, 5), tensor(1, 0, -100, 4, 1)
ORDER, KEYS = tensor(3, 1, 3, 0, 2), torch.tensor([[3, 1, 3, 0, 2], [0, 5, 1, 1, 1]])
THREES = ((0, 3), (3, 6), (6, 9), (9, 12))
OPERANDS: dict[str, dict[str, Any]] = named_cases("operands", globals())

# -- helpers of expressions


def beside(x: Tensor, value: float, other: float, is_first: bool) -> Tensor:
    """One row of a value and two of another: before and after the rows of x, or both after them."""
    fills = x.new_full((1, 3), value), x.new_full((2, 3), other)
    return torch.cat([fills[0], x, fills[1]] if is_first else [x, *fills])


def put_by(x: Tensor, number: Tensor, dims: int, accumulate: bool = False, dtype: torch.dtype = torch.bool) -> Tensor:
    """One number at the places of a mask of so many leading dimensions; of another type the mask has indices."""
    mask = (x > 0).flatten(dims).any(-1) if dims < 3 else x > 0
    return aten.index_put(x, [mask.to(dtype)], number, accumulate)


def in_blocks(x: Tensor, size: int = 3) -> Tensor:
    return aten.view(x, [2, 12 // size, size, 2])


def with_view(x: Tensor, part: Tensor) -> list[Tensor]:
    return [part, x.unflatten(1, (-1, 3)).sin()]


def of_blocks(x: Tensor, size: int = 3) -> Tensor:
    return x.view(2, 12 // size, size, 2).sin().view(2, 12, 2)


def placed(g: Tensor, start: int, end: int, step: int = 1) -> Tensor:
    """The gradient of a slice."""
    return aten.slice_backward(g[:, start:end:step], [2, 12, 2], 1, start, end, step)


def padded(a: Tensor, b: Tensor, end: int = 6) -> Tensor:
    """A sum of gradients: rows of `a` before `end`, rows of `b` after the sixth."""
    return placed(a, 0, end) + placed(b, 6, 12)


def buffer(x: Tensor, *rows: tuple[int, int], base: Tensor | None = None) -> Tensor:
    """Rows [start, end) of x written into a buffer, one after the other, each in another way."""
    made = x.tan() if base is None else base
    for number, (start, end) in enumerate(rows):
        made = made.slice_scatter(x[:, start:end].sin() * (1 + number), 1, start, end)
    return made


def written(x: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    """Writes into a buffer, as AOTAutograd traces them."""

    def function(x: Tensor) -> Tensor:
        made = x.clone()
        write(made)
        return made

    result: Tensor = torch.func.functionalize(function)(x)
    return result


def filled(x: Tensor, *places: tuple[Any, float]) -> Tensor:
    return written(x, lambda made: [made[place].fill_(number) for place, number in places])


def back(x: Tensor, g: Tensor, probabilities: Function = lambda x: torch.softmax(x, -1), dim: int = -1) -> Tensor:
    return aten._softmax_backward_data(g, probabilities(x), dim, x.dtype)


def at_largest(x: Tensor, d: Tensor) -> Tensor:
    """The sum of a gradient, at the largest score."""
    return torch.zeros_like(d).scatter(-1, x.max(-1, keepdim=True).indices, d.sum(-1, keepdim=True))


def among(largest: Tensor, d: Tensor) -> Tensor:
    return d.sum(-1, keepdim=True) / largest.sum(-1, keepdim=True) * largest


def with_sink(x: Tensor, g: Tensor, sink: float, is_first: bool) -> list[Tensor]:
    """A softmax with a column that is then dropped, before or after the scores, and its gradient."""
    column = x.new_full((2, 7, 1), sink) * x.new_ones(2, 7, 1)
    both = torch.softmax(torch.cat([column, x] if is_first else [x, column], -1), -1)
    low, high = (1, 6) if is_first else (0, 5)
    part = both[..., low:high]
    d = aten._softmax_backward_data(aten.slice_backward(g, [2, 7, 6], 2, low, high, 1), both, -1, x.dtype)
    return [part, d[..., low:high], d[..., :1] if is_first else d[..., 5:]]


def gradient_of_the_column(x: Tensor, g: Tensor) -> list[Tensor]:
    """The part of the scores is used, and the gradient is the column's."""
    both = torch.softmax(torch.cat([x, g[..., 1:2]], -1), -1)
    d = aten._softmax_backward_data(aten.slice_backward(g[..., :1], [2, 7, 6], 2, 5, 6, 1), both, -1, x.dtype)
    return [both[..., :5], d[..., :5], d[..., 5:]]


def mean_loss(
    x: Tensor, y: Tensor, weight: Tensor | None, g: Tensor, count: float | None = None, ignored: int = -100
) -> list[Tensor]:
    """A mean loss, its count of labels, and its gradient, if asked for with another count."""
    loss, total = aten.nll_loss_forward(x, y, weight, 1, ignored)
    total = total if count is None else x.new_full((), count) * g.sign()
    return [loss, total, aten.nll_loss_backward(g, x, y, weight, 1, ignored, total)]


def convolution_back(g: Tensor, x: Tensor, w: Tensor, stride: Any, padding: Any, dilation: Any, how: Any = (False, 1)) -> Any:
    """The gradients of a convolution; `how`: whether it is transposed, and its groups."""
    transposed, groups = how
    output_padding, asked = [0] * len(stride), [True, True, not transposed]
    arguments = [w.shape[0]], stride, padding, dilation, transposed, output_padding, groups, asked
    return list(aten.convolution_backward(g, x, w, *arguments))[: sum(asked)]


def columns(index: Tensor) -> Tensor:
    return index[..., None].expand(*index.shape, 3)


def numbered(order: Tensor, numbers: Tensor | None = None) -> Tensor:
    """The inverse of an order, if numbers count up."""
    return torch.zeros_like(order).scatter(1, order, (torch.arange(5) if numbers is None else numbers).expand_as(order))


def in_order(x: Tensor, keys: Tensor, use: Function, descending: bool = False) -> Any:
    """A use of rows [2 5 3], sorted in each sequence, of their order and of its inverse."""
    order = keys.argsort(1, descending=descending)
    undone = numbered(order)
    return use(x.gather(1, columns(order)) * 2, order, undone)


def found(x: Tensor, keys: Tensor, index_of: Function) -> Any:
    return in_order(x, keys, lambda rows, order, undone: [rows.gather(1, columns(index_of(order, undone))), undone])


def added(x: Tensor, keys: Tensor, by_order: bool, base: Function = torch.zeros_like, count: int | None = None) -> Any:
    """Sorted rows are added at the places of their order, or of its inverse."""

    def use(rows: Tensor, order: Tensor, undone: Tensor) -> list[Tensor]:
        into, where = base(rows), order if by_order else undone
        where, rows = (where[:, :count], rows[:, :count]) if count else (where, rows)
        return [into.scatter_add(1, columns(where), rows), *[undone] * by_order]

    return in_order(x, keys, use)


def along(x: Tensor, keys: Tensor, gathered: int, ordered: int, counted: int) -> Tensor:
    """Rows and columns [5 5], gathered along one dimension by the inverse of an order along one, which counts along one."""
    numbers = torch.arange(5).view((5, 1) if counted == 0 else (1, 5)).expand(5, 5)
    return x.gather(gathered, torch.zeros_like(keys).scatter(1, keys.argsort(ordered), numbers))


def grouped(q: Tensor, k: Tensor, g: Tensor, summed: Function) -> list[Tensor]:
    """Attention with repeated heads, and gradients of the keys and values."""
    wide = k[:, :, None].expand(2, 2, 3, 4, 2).reshape(2, 6, 4, 2)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, wide, wide, 0.0, True)
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward(g, q, wide, wide, out, lse, 0.0, True)
    return [out, back[0], *(summed(part) for part in back[1:])]


# -- the table

NAME = re.compile(r"(?P<name>.*?)(?: \((?P<rules>[^)]*)\))?")


def _case(mark: str, operands: str, made: str) -> Case:
    names = dict(globals())
    start, _, others = operands.partition(", ") if operands.split(",")[0] in OPERANDS else ("", "", operands)
    given: dict[str, Tensor] = {**OPERANDS.get(start, {}), **eval(f"dict({others})", names)}
    return Case(eval(f"lambda {', '.join(given)}: {made}", names), tuple(given.values()), mark != "-", mark != "~")


def _read() -> Iterator[tuple[str, list[str], Case]]:
    for section in read(Path(__file__).with_suffix(".txt"), 4).values():
        for name, *case in section:
            found = NAME.fullmatch(name)
            assert found, name
            yield found["name"], (found["rules"] or "").split(", "), _case(*case)


def _constants() -> Iterator[tuple[str, Case]]:
    """Constants written to random rows and columns."""
    random = Random(0)
    for count in range(1, 12):
        slices = [[slice(*sorted(random.sample(range(13), 2))) for _ in range(2)] for _ in range(count)]
        places = [(tuple(one), random.choice((0.0, INF))) for one in slices]
        yield f"constants at random {count}", Case(lambda x, places=places: filled(x, *places), (special(12, 12),))


TABLE = list(_read())
assert len({name for name, *_ in TABLE}) == len(TABLE), "a name is there twice"
CASES = {**{name: case for name, _, case in TABLE}, **dict(_constants())}
EXAMPLES = {rule: case for _, rules, case in TABLE for rule in rules if rule}  # by rule, and by "not rule"
