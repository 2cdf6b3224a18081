"""Calls and programs on difficult numbers, and the value ranges that the analysis claims."""

import operator
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from streamfx.dialect.attention import ATTENTION
from streamfx.dialect.products import GROUPED_MM, GROUPED_OUTER
from streamfx.ir.joint import is_tensor
from streamfx.ir.ranges import Range, constant, full_range, hull
from streamfx.passes.ops.ranges import TRANSFERS, ValueRanges
from tests.support.samples import SAMPLES, Sizes, calls, table_in

aten = torch.ops.aten
INF = torch.inf
FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
TYPES = (*FLOATING, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
BELOW = [1.0, 7.0, 3e4, 1e30, 3e38, INF]
HURTING = [0.0, -0.0, 0.5, 3.0, 200.0, 300.0, 1e4, 70000.0, *BELOW, *(-number for number in BELOW), float("nan")]
LARGE = [2e6, -1e9, 1e19, -1e30, INF, float("nan")]
MILD = [0.0, 1.0, -1.0, 0.5, 2.0, -3.0]
PRODUCTS = {  # their results for large numbers are assumed, not proven
    *(aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.addmm.default, aten.baddbmm.default),
    *(aten.convolution.default, aten._cdist_forward.default, GROUPED_MM, GROUPED_OUTER, ATTENTION),
}
ASSUMED = {aten.randn.default, aten.rand.default, aten.bernoulli.default, aten.rand_like.default}  # drawn anew by each call
MORE, _ = table_in("samples_of_values.txt")


@dataclass(frozen=True)
class Drawn:
    """One call."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    exact: bool  # sources are known by the least and the largest number that they hold, else by their type

    def run(self) -> list[Tensor]:
        made = self.operator(*self.args, **self.kwargs)
        return [item for item in (made if isinstance(made, (tuple, list)) else (made,)) if isinstance(item, Tensor)]

    def traced(self) -> tuple[fx.Graph, Callable[[int], Range]]:
        """The call as a graph, and the range of each of its results."""
        graph, values = fx.Graph(), ValueRanges()

        def placeholder(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return item
            node = graph.placeholder("x")
            node.meta["val"] = item
            values.note(node, held(item) if self.exact else full_range(item.dtype))
            return node

        args, kwargs = pytree.tree_map(placeholder, (self.args, dict(self.kwargs)))
        node = graph.call_function(self.operator, args, kwargs)

        def known(position: int) -> Range:
            made = self.operator(*self.args, **self.kwargs)
            node.meta["val"] = tuple(made) if isinstance(made, list) else made
            if is_tensor(node):
                return values.of(node)
            part = graph.call_function(
                operator.getitem, (node, [i for i, item in enumerate(made) if isinstance(item, Tensor)][position])
            )
            part.meta["val"] = made[part.args[1]]
            return values.of(part)

        return graph, known


def drawn(operator: Any, seed: int) -> Drawn:
    """A call of an operator: of elementwise ones by their schema, of others by the sample call of their rule."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    args, kwargs = (_by_schema if TRANSFERS[operator].elementwise else _by_sample)(operator, chance)
    return Drawn(operator, args, kwargs, chance.random() < 0.7)


def _numbers(chance: random.Random, shape: tuple[int, ...], dtype: torch.dtype, among: list[float] = HURTING) -> Tensor:
    """Of few kinds at a time, so that ranges are narrow as often as wide."""
    kinds = chance.sample(among, chance.randint(1, 4))
    count = torch.Size(shape).numel()
    drawn = torch.tensor([chance.choice(kinds) for _ in range(count)], dtype=torch.float64).view(shape)
    return drawn.to(dtype) if dtype.is_floating_point else drawn.nan_to_num(0, 1e9, -1e9).clamp(-1e9, 1e9).to(dtype)


def _by_schema(operator: Any, chance: random.Random) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dtype, arguments = chance.choice(TYPES), operator._schema.arguments
    given = {argument: _argument(argument, chance, dtype) for argument in arguments}
    kwargs = {argument.name: given[argument] for argument in arguments if argument.kwarg_only}
    return tuple(given[argument] for argument in arguments if not argument.kwarg_only), {
        name: value for name, value in kwargs.items() if value is not None
    }


def _argument(argument: Any, chance: random.Random, dtype: torch.dtype) -> Any:
    kind = str(argument.type)
    if argument.name in ("condition", "mask"):
        return torch.tensor([chance.random() < 0.5 for _ in range(5)])
    if argument.name == "rounding_mode":
        return chance.choice([None, "floor", "trunc"])
    if argument.name == "approximate":
        return chance.choice(["none", "tanh"])
    if argument.name == "dtype":
        return chance.choice(TYPES)
    if "Tensor" in kind:
        own = dtype if chance.random() < 0.7 else chance.choice(TYPES)
        return _numbers(chance, chance.choice([(5,), (), (1,)]), own)
    if kind in ("number", "float", "int", "Optional[number]", "Optional[float]"):
        return chance.choice([1, 2, -3, 0, 3, 0.5, -2.5, 300, -1e30, 20, 1e10, INF, -INF])
    return None


def _by_sample(operator: Any, chance: random.Random) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that the operator's rule is tested with, floating-point numbers drawn anew."""
    sizes = Sizes(2, 5, 3, 4, 6)
    call = chance.choice(list(calls(operator, sizes, MORE if operator in MORE else SAMPLES)))
    dtype = chance.choice(FLOATING)
    mild = operator in PRODUCTS or operator is aten.histc.default
    among = (LARGE if operator in PRODUCTS and chance.random() < 0.5 else MILD) if mild else HURTING

    def renewed(item: Any) -> Any:
        is_number = isinstance(item, Tensor) and item.is_floating_point()
        return _numbers(chance, tuple(item.shape), torch.float64 if mild else dtype, among) if is_number else item

    return pytree.tree_map(renewed, (call.args, dict(call.kwargs)))


def held(tensor: Tensor) -> Range:
    """The range of a tensor's numbers."""
    numbers = tensor.detach().flatten().tolist()
    known = [constant(number) for number in numbers if number == number]
    nan = len(known) < len(numbers)
    around = hull(*known) if known else Range(-INF, INF)
    return Range(around.low, around.high, nan)


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.found[n] = super().run_node(n)
        return self.found[n]


def traced_values(function: Callable[..., Any], inputs: list[Tensor]) -> Iterator[tuple[fx.Node, Range, Tensor]]:
    """Yield each value of a traced function: its node, its claimed range, and the value."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    recorder = _Recorder(module)
    recorder.run(*inputs)
    values = ValueRanges()
    for node in module.graph.nodes:
        if node.op == "call_function" and is_tensor(node):
            yield node, values.of(node), recorder.found[node]
