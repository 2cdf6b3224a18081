"""Writes a traced graph as plain data, for JSON, and reads it: operators, and a description of each value.

Data omits line numbers and addresses, which differ between machines. Reading needs no tracing: values are described only.
"""

import base64
import dataclasses
import importlib
import math
import operator
import zlib
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._functorch._aot_autograd import descriptors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy import functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from streamfx.dialect.associative_scan import COMBINES, SCAN_BACKWARD, TREE_SCAN, register_combine_graph
from streamfx.torch_private import real_values

Plain = Any  # data of JSON
MOST_EXACT = 4096  # compressed bytes
MODULES = ("nn_module_stack", "fwd_nn_module_stack")  # names of stages come from these
NAMED = (torch.dtype, torch.layout, torch.memory_format)
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
FUNCTIONS = {name: item for name, item in vars(functions).items() if isinstance(item, type) and issubclass(item, sympy.Function)}
FUNCTIONS["int_oo"] = int_oo
LIBRARIES = {"transformers": "transformers.integrations.moe"}  # modules that register operators, by namespace
SCANS = (TREE_SCAN, SCAN_BACKWARD)  # they have the number of the function that combines two rows


class NotWrittenError(TypeError):
    """A value of a graph cannot be written as plain data."""


def written(module: fx.GraphModule) -> Plain:
    """A traced graph as plain data."""
    return Writer().written(module)


def read(data: Plain) -> fx.GraphModule:
    """The graph of plain data, with fake values in a new mode."""
    return Reader(data).module


# -- writing


class Writer:
    """Writes one graph; equal descriptions of values are written once."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.sizes: ShapeEnv | None = None
        # by their order: the names in the trace depend on the source of an input
        self.names: dict[Any, sympy.Symbol] = {}
        self.combines: dict[int, Plain] = {}  # functions that combine two rows of a scan, by number

    def written(self, module: fx.GraphModule) -> Plain:
        body = self._graph(module)
        guards = self._guards()
        combines = {"combines": [*self.combines.values()]} if self.combines else {}
        return {"symbols": self._symbols(), "guards": guards, "values": list(self.values), **combines, **body}

    def _graph(self, module: fx.GraphModule) -> Plain:
        held: dict[str, Plain] = {}
        for node in module.graph.find_nodes(op="get_attr"):
            value = operator.attrgetter(str(node.target))(module)
            held[str(node.target)] = {"graph": self._graph(value)} if isinstance(value, fx.GraphModule) else exact(value)
        return {"held": held, "nodes": [self._node(node) for node in module.graph.nodes]}

    def _node(self, node: fx.Node) -> Plain:
        kept = {key: self._argument(value) for key, value in self._kept(node).items()}
        target = _target_name(node.target) if node.op == "call_function" else str(node.target)
        args = node.args if node.target not in SCANS else (*node.args[:-1], self._combine(node.args[-1]))
        return [node.name, node.op, target, self._argument(args), self._argument(dict(node.kwargs)), kept]

    def _combine(self, number: Any) -> int:
        """The index of a function that combines two rows of a scan, in the graph."""
        if number not in self.combines:
            combine = COMBINES[number]
            graph = self._graph(fx.GraphModule(nn.Module(), combine.graph))
            self.combines[number] = {"graph": graph, "given": combine.num_shared}
        return [*self.combines].index(number)

    def _kept(self, node: fx.Node) -> dict[str, Any]:
        found = {key: [[entry[0], _kind(entry[1])] for entry in node.meta[key].values()] for key in MODULES if node.meta.get(key)}
        if "val" in node.meta:
            found["val"] = node.meta["val"]
        if "desc" in node.meta:
            found["desc"] = node.meta["desc"]
        return found

    def _argument(self, value: Any) -> Plain:
        if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
            return value
        if isinstance(value, list):
            return [self._argument(item) for item in value]
        if isinstance(value, tuple):  # a torch.Size, too
            return {"tuple": [self._argument(item) for item in value]}
        if isinstance(value, Mapping):
            return {"dict": [[self._argument(key), self._argument(item)] for key, item in value.items()]}
        if isinstance(value, fx.Node):
            return {"node": value.name}
        if isinstance(value, Tensor):
            return {"value": self._value(value)}
        if isinstance(value, SYMBOLIC):
            return {type(value).__name__: self._expression(value)}
        if isinstance(value, slice):
            return {"slice": [self._argument(item) for item in (value.start, value.stop, value.step)]}
        if isinstance(value, NAMED):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if dataclasses.is_dataclass(value) and type(value).__module__ == descriptors.__name__:
            return {type(value).__name__: [self._argument(getattr(value, item.name)) for item in dataclasses.fields(value)]}
        raise NotWrittenError(f"{type(value).__qualname__} {value!r:.80}")

    def _value(self, value: Tensor) -> int:
        """The number of a tensor's description."""
        if value.layout is not torch.strided:
            raise NotWrittenError(f"a tensor that is not strided: {value!r:.80}")
        seen = " conj" * value.is_conj() + " neg" * value.is_neg()
        sizes = (value.shape, value.stride(), (value.storage_offset(),))
        shape, strides, offset = (" ".join(map(self._size, items)) for items in sizes)
        text = f"{dtype_name(value.dtype)} {value.device}{seen}|{shape}|{strides}|{offset}"
        return self.values.setdefault(text, len(self.values))

    def _size(self, size: Any) -> str:
        return self._expression(size) if isinstance(size, torch.SymInt) else str(size)

    def _expression(self, number: Any) -> str:
        self.sizes = number.node.shape_env
        return self._text(number.node.expr, number.node.shape_env)

    def _text(self, expression: Any, sizes: ShapeEnv) -> str:
        for symbol in sorted(expression.free_symbols - self.names.keys(), key=list(sizes.var_to_range).index):
            self.names[symbol] = sympy.Symbol(f"s{len(self.names)}", integer=True)
        return sympy.srepr(expression.xreplace(self.names)).replace(" ", "")

    def _symbols(self) -> Plain:
        """Each symbolic size, with its hint and its range."""
        if self.sizes is None:
            return []
        numbers, ranges = self.sizes.backed_var_to_val, self.sizes.var_to_range
        if not numbers.keys() >= self.names.keys():
            raise NotWrittenError("a size that depends on data")
        ends = ((str(ranges[item].lower), str(ranges[item].upper)) for item in self.names)
        return [[str(name), int(numbers[item]), *pair] for (item, name), pair in zip(self.names.items(), ends, strict=True)]

    def _guards(self) -> Plain:
        """Guards of symbols of the graph: a symbol that equals another one is replaced by it."""
        if self.sizes is None:
            return []
        asked = [guard.expr for guard in self.sizes.guards if guard.expr.free_symbols]
        return sorted({self._text(item, self.sizes) for item in asked if self.names.keys() >= item.free_symbols})


def _kind(module: Any) -> str:
    return module if isinstance(module, str) else f"{module.__module__}.{module.__qualname__}"


def _target_name(target: Any) -> str:
    """The name by which `_target` finds a function."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
    if module is None or getattr(importlib.import_module(module), name, None) is not target:
        raise NotWrittenError(f"the function {target!r:.80}")
    return f"{module}:{name}"


@cache
def _target(name: str) -> Callable[..., Any]:
    """The function of a name that `_target_name` returned."""
    if ":" in name:
        module, _, own = name.partition(":")
        home: Any = importlib.import_module(module)
    else:
        home, own = torch.ops, name
        if (library := LIBRARIES.get(name.partition(".")[0])) is not None:
            importlib.import_module(library)
    found: Callable[..., Any] = operator.attrgetter(own)(home)
    return found


# -- reading


class Reader:
    """Reads one graph."""

    def __init__(self, data: Plain) -> None:
        self.data = data
        self.sizes = ShapeEnv()
        self.combines: list[int] = []  # numbers of functions that combine two rows of a scan
        self.mode = FakeTensorMode(shape_env=self.sizes if data["symbols"] else None, allow_non_fake_inputs=True)
        self.mode.cache_enabled = False  # its check of an entry rejects offsets after the end, as flips have them

    @cached_property
    def module(self) -> fx.GraphModule:
        with torch.no_grad():
            for guard in self.data["guards"]:
                self.sizes.evaluate_expr(self._expression(guard))
            for combine in self.data.get("combines", ()):
                self.combines.append(register_combine_graph(self._module(combine["graph"]).graph, combine["given"]))
            return self._module(self.data)

    @cached_property
    def symbols(self) -> dict[str, Any]:
        """Symbolic sizes by their names in the data."""
        symbols, sizes = {}, self.sizes
        for name, number, lower, upper in self.data["symbols"]:
            symbol = sizes.create_symbol(number, ConstantSource(name), DimDynamic.DYNAMIC, None, do_not_specialize_zero_one=True)
            sizes.var_to_range[symbol] = ValueRanges(*(sympy.sympify(end, locals=FUNCTIONS) for end in (lower, upper)))
            symbols[name] = symbol
        return symbols

    def _module(self, data: Plain) -> fx.GraphModule:
        root, graph, nodes = nn.Module(), fx.Graph(), dict[str, fx.Node]()
        for name, value in data["held"].items():
            setattr(root, name, self._module(value["graph"]) if "graph" in value else numbers_of(value))
        for name, op, target, args, kwargs, kept in data["nodes"]:
            function = _target(target) if op == "call_function" else target
            given = self._argument(args, nodes)
            if function in SCANS:
                given = (*given[:-1], self.combines[given[-1]])
            node = graph.create_node(op, function, given, self._argument(kwargs, nodes), name=name)
            assert node.name == name, f"the node {name} is called {node.name}"
            node.meta = self._kept(kept)
            nodes[name] = node
        return fx.GraphModule(root, graph)

    def _kept(self, data: Plain) -> dict[str, Any]:
        found = {key: self._argument(value, {}) for key, value in data.items()}
        return found | {key: {str(i): tuple(entry) for i, entry in enumerate(found[key])} for key in MODULES if key in found}

    def _argument(self, value: Plain, nodes: Mapping[str, fx.Node]) -> Any:
        if isinstance(value, list):
            return [self._argument(item, nodes) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, own),) = value.items()
        match kind:
            case "node":
                return nodes[own]
            case "value":
                return self._value(self.data["values"][own])
            case "tuple":
                return tuple(self._argument(item, nodes) for item in own)
            case "dict":
                return {self._argument(key, nodes): self._argument(item, nodes) for key, item in own}
            case "slice":
                return slice(*(self._argument(item, nodes) for item in own))
            case "torch":
                return getattr(torch, own)
            case "device":
                return torch.device(own)
            case "SymInt" | "SymFloat" | "SymBool":
                return self._symbolic(kind, own)
        return getattr(descriptors, kind)(*(self._argument(item, nodes) for item in own))

    def _value(self, text: str) -> Tensor:
        kind, *sizes = text.split("|")
        dtype, device, *seen = kind.split(" ")
        shape, strides, (offset,) = ([self._size(size) for size in part.split()] for part in sizes)
        if not self.data["symbols"] and not offset and not seen:  # same result as below, in a tenth of the time
            value = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device="meta")
            return FakeTensor(self.mode, value, torch.device(device))
        with self.mode:
            options = {"dtype": getattr(torch, dtype), "device": device}
            if isinstance(offset, int) and not offset:
                value = torch.empty_strided(shape, strides, **options)
            else:
                last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
                value = torch.empty(last, **options).as_strided(shape, strides, offset)
            value = value.conj() if "conj" in seen else value
            return torch._neg_view(value) if "neg" in seen else value

    def _size(self, text: str) -> Any:
        return int(text) if text.isdigit() else self._symbolic("SymInt", text)

    def _expression(self, text: str) -> Any:
        return eval(text, {**vars(sympy), **FUNCTIONS, "Symbol": lambda name, **_: self.symbols[name]})

    def _symbolic(self, kind: str, text: str) -> Any:
        expression, sizes = self._expression(text), self.sizes
        hint = number_of(expression.xreplace(dict(sizes.backed_var_to_val)))
        if kind == "SymInt":
            return sizes.create_symintnode(expression, hint=int(hint))
        if kind == "SymFloat":
            return sizes.create_symfloatnode(expression, hint=float(hint))
        return sizes.create_symboolnode(expression)


# -- values of inputs: exact for masks, tables and ids, random for weights


def exact(tensor: Tensor) -> Plain:
    """All numbers of a tensor."""
    with real_values():  # a trace with this tensor may be active
        data = tensor.detach().cpu().contiguous()
        packed = zlib.compress(data.reshape(-1).view(torch.uint8).numpy().tobytes(), 9) if data.numel() else b""
    return {"dtype": dtype_name(data.dtype), "shape": list(data.shape), "bytes": base64.b64encode(packed).decode()}


def drawn(tensor: Tensor) -> Plain:
    """The mean and the standard deviation of a tensor."""
    data = tensor.detach().cpu().double()
    mean = float(data.mean()) if data.numel() else 0.0
    deviation = float(data.std(correction=0)) if data.numel() else 0.0
    return {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "drawn": [_short(mean), _short(deviation)]}


def written_numbers(value: Any, is_weight: bool) -> Plain:
    """An input of a graph. Floats of weights and of large inputs become mean and deviation."""
    if not isinstance(value, Tensor):
        return value
    can_be_drawn = value.is_floating_point() and bool(value.isfinite().all())
    if is_weight and can_be_drawn:
        return drawn(value)
    data = exact(value)
    return drawn(value) if can_be_drawn and len(data["bytes"]) > MOST_EXACT else data


def numbers_of(data: Plain, seed: int = 0) -> Any:
    """An input of plain data; random values depend on the seed only."""
    if not isinstance(data, dict):
        return data
    dtype, shape = getattr(torch, data["dtype"]), data["shape"]
    if "bytes" in data:
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        packed = bytearray(zlib.decompress(base64.b64decode(data["bytes"])))
        return torch.frombuffer(packed, dtype=torch.uint8).view(dtype).reshape(shape)
    mean, deviation = data["drawn"]
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul_(deviation).add_(mean).to(dtype)


def number_of(value: Any) -> Any:
    """Python's number of a number of sympy."""
    return bool(value) if value.is_Boolean else int(value) if value.is_Integer else float(value)


def _short(number: float) -> float:
    return float(f"{number:.3g}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
