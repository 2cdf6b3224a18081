"""Global names of written code: imports of operators and functions, and constants that are written as expressions.

An object without a text becomes a `NotWritten`, which raises an error if the code uses it.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import sympy
import torch
from torch import fx

from streamfx.dialect.associative_scan import COMBINES
from streamfx.errors import ReportError
from streamfx.ir.recurrence import TreePlan
from streamfx.kernels.mask_programs import MaskProgram
from streamfx.runtime.buffers import rows_of, rows_view
from streamfx.runtime.runtime_sizes import FUNCTIONS
from streamfx.tools.report.as_python.identifiers import Identifiers
from streamfx.torch_private import FakeTensor, OpOverload

FUNCTION_NAME = "<name>"
NOT_WRITTEN = "{name} = NotWritten("
MAX_ELEMENTS = 256  # of a constant tensor whose values are written
LITERALS = (bool, int, str, type(None))
TORCH_TYPES = (torch.dtype, torch.layout, torch.memory_format)  # their str is source


class NotWritten:
    """Represents an object that written code needs and that has no text; any use of it raises `ReportError`."""

    def __init__(self, description: str) -> None:
        self.description = description

    def _raise(self) -> Any:
        raise ReportError(
            "this module cannot run as text",
            found=f"it needs {self.description}",
            do="read it, or run the compiled model; or set this global of the module to the object",
        )

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self._raise()

    def __getattr__(self, name: str) -> Any:
        return None if name.startswith("__") else self._raise()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        found = next((item for item in (*args, *(kwargs or {}).values()) if isinstance(item, cls)), cls("an object"))
        return found._raise()


def registered_combine(combine_id: int) -> int:
    """Return the identifier of a scan's combine function; raise `ReportError` if this process has not traced such a scan."""
    if combine_id not in COMBINES:
        raise ReportError(
            "this module runs an associative scan",
            found="its combine function is unknown",
            do="run it where explain has traced it",
        )
    return combine_id


class ModuleGlobals:
    """The imports and definitions that written code needs; they are collected while it is written."""

    def __init__(self, write_graph: Callable[[fx.Graph, bool], str]) -> None:
        """Start empty. `write_graph`: returns a graph as a function `FUNCTION_NAME`; if the flag is set, it computes a mask."""
        self.imports: dict[str, None] = {}
        self.definitions: list[str] = []
        self.names = Identifiers(("torch", "aten", "forward", "backward", "step"))
        self._write_graph = write_graph
        self._name_of_text: dict[str, str] = {}  # by text of the definition, with a blank for the name
        self._name_of_object: dict[int, tuple[str, Any]] = {}  # by id, with the object, which keeps the id valid
        self._modules: dict[str, str] = {}

    def text(self, value: Any) -> str:
        """Return a constant, operator or function as an expression; imports and definitions that it needs are added."""
        if type(value) in LITERALS:
            return repr(value)
        if isinstance(value, (float, complex)):
            return repr(value) if isinstance(value, complex) or math.isfinite(value) else f"float({str(value)!r})"
        if isinstance(value, TORCH_TYPES):
            return str(value)
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if isinstance(value, OpOverload):
            return operator_text(value)
        if isinstance(value, (list, tuple, Mapping, slice, frozenset, set)):
            return self._collection(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return str(value)
        if isinstance(value, sympy.Basic):
            return self._expression(value)
        if isinstance(value, MethodType) and not isinstance(value.__self__, type):
            return self.text(value.__self__) if _is_graph(value) else f"{self.text(value.__self__)}.{value.__name__}"
        if isinstance(value, partial):
            arguments = [*map(self.text, value.args), *(f"{key}={self.text(item)}" for key, item in value.keywords.items())]
            return f"{self._module('functools')}.partial({', '.join([self.text(value.func), *arguments])})"
        if isinstance(value, (FunctionType, BuiltinFunctionType, type, ModuleType, enum.Enum)) or callable(value):
            name = self._imported(value)
            if name is not None:
                return name
        return self._defined(value)

    @property
    def names_in_use(self) -> frozenset[str]:
        """The global names so far, which local names must not hide."""
        return self.names.used

    def sizes(self, text: str) -> str:
        """Import the functions that generated code of sizes and rows calls (`member_bounds`, ...); return the code."""
        for name, function in {**FUNCTIONS, "rows_of": rows_of, "rows_view": rows_view}.items():
            if f"{name}(" not in text:
                continue
            if (module := getattr(function, "__module__", "")) and is_importable(module, name, function):
                self.imports[f"from {module} import {name}"] = None
            else:
                self.imports["from streamfx.runtime.runtime_sizes import FUNCTIONS"] = None
                self.imports[f"{name} = FUNCTIONS[{name!r}]"] = None
        if "math." in text:
            self.imports["import math"] = None
        return text

    def _expression(self, value: sympy.Basic) -> str:
        """Return a symbolic size, of a graph with dynamic sizes."""
        if value.is_Integer:
            return str(value)
        self.imports["import sympy"] = None
        return f"sympy.sympify({str(value)!r})"

    def _collection(self, value: Any) -> str:
        """Return a collection, item by item."""
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{self.text(key)}: {self.text(item)}" for key, item in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self.text, (value.start, value.stop, value.step)))})"
        items = ", ".join(map(self.text, value))
        if isinstance(value, (frozenset, set)):
            return f"{type(value).__name__}([{items}])"
        if hasattr(value, "_fields"):
            return f"{self.text(type(value))}({items})"
        return f"({items}{',' * (len(value) == 1)})" if isinstance(value, tuple) else f"[{items}]"

    def _imported(self, value: Any) -> str | None:
        """Import a function, class or module, and return its name; None if no module holds it by name.

        Functions of a module are called as `module.function`.
        """
        if isinstance(value, ModuleType):
            return self._module(value.__name__)
        module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", getattr(value, "__name__", None))
        if isinstance(value, enum.Enum):
            module, path = type(value).__module__, f"{type(value).__qualname__}.{value.name}"
        if module is None and path is not None:
            module = "builtins"
        if not isinstance(module, str) or not isinstance(path, str) or not is_importable(module, path, value):
            return None
        if module == "builtins":
            return path
        if module == "_operator":
            module = "operator"
        return f"{self._module(module)}.{path}"

    def _module(self, path: str) -> str:
        """Import a module and return its name."""
        if path not in self._modules:
            package, _, name = path.rpartition(".")
            own_name = self.names.new(name)
            alias = "" if own_name == name else f" as {own_name}"
            if path != "torch":
                self.imports[f"from {package} import {name}{alias}" if package else f"import {name}{alias}"] = None
            self._modules[path] = own_name if path != "torch" else "torch"
        return self._modules[path]

    def _defined(self, value: Any) -> str:
        """Define a global for an object, and return its name; equal definitions share one, unless the objects have no text."""
        known = self._name_of_object.get(id(value))
        if known is not None:
            return known[0]
        is_function = isinstance(value, (MaskProgram, fx.GraphModule))
        hint = "compute_mask" if is_function else str(getattr(value, "name", "") or type(value).__name__).upper()
        definition = self._definition(value)
        name = None if definition.startswith(NOT_WRITTEN) else self._name_of_text.get(definition)
        if name is None:
            name = self._name_of_text[definition] = self.names.new(hint)
            self.definitions.append(definition.format_map({"name": name}))
        self._name_of_object[id(value)] = name, value
        return name

    def _definition(self, value: Any) -> str:
        """Return the text that defines a global `{name}` as an object equal to `value`, or as a `NotWritten`."""
        if isinstance(value, (MaskProgram, fx.GraphModule)):
            graph = value.body.graph if isinstance(value, MaskProgram) else value.graph
            return _braced(self._write_graph(graph, isinstance(value, MaskProgram))).replace(FUNCTION_NAME, "{name}")
        text = self._tensor(value) if isinstance(value, torch.Tensor) else self._constructor(value)
        if text is None:
            self.imports["from streamfx.tools.report.as_python.module_globals import NotWritten"] = None
            return f"{NOT_WRITTEN}{_braced(repr(_describe(value)))})"
        return f"{{name}} = {_braced(text)}"

    def _tensor(self, value: torch.Tensor) -> str | None:
        """Return a small tensor with its values, or None."""
        if isinstance(value, FakeTensor) or value.is_meta or value.numel() > MAX_ELEMENTS or type(value) is not torch.Tensor:
            return None
        return f"torch.tensor({self.text(value.tolist())}, dtype={value.dtype}, device={self.text(value.device)})"

    def _constructor(self, value: Any) -> str | None:
        """Return the call that constructs an equal object, or None: of a dataclass, or of a class whose arguments it keeps."""
        kind = type(value)
        class_name = self._imported(kind)
        if class_name is None:
            return None
        if dataclasses.is_dataclass(kind):
            keywords = [field.name for field in dataclasses.fields(kind) if field.init]
        else:
            keywords = _constructor_arguments(kind)
        if not keywords or not all(keyword in vars(value) for keyword in keywords):
            return None
        if any(_is_graph(getattr(value, keyword)) for keyword in keywords):  # it needs the graph, not only its function
            return None
        texts = {keyword: self.text(getattr(value, keyword)) for keyword in keywords}
        if kind is TreePlan:
            texts["combine"] = f"{self._imported(registered_combine)}({texts['combine']})"
        return f"{class_name}({', '.join(f'{keyword}={text}' for keyword, text in texts.items())})"


def _constructor_arguments(kind: type) -> list[str]:
    """Return the names of the arguments of a class; none if they are unknown."""
    try:
        return [name for name in inspect.signature(kind).parameters if name not in ("args", "kwargs")]
    except (TypeError, ValueError):
        return []


def _is_graph(value: Any) -> bool:
    """Return whether a function is the `forward` of a graph module."""
    return isinstance(getattr(value, "__self__", None), fx.GraphModule) and value.__name__ == "forward"


def operator_text(target: OpOverload) -> str:
    """Return an operator of torch: `aten.mm`, `aten.sum.dim_IntList`; those of other libraries with `torch.ops`."""
    name = str(target).removesuffix(".default")
    return name if target.namespace == "aten" else f"torch.ops.{name}"


def is_importable(module: str, path: str, value: Any) -> bool:
    """Return whether importing `path` from the module returns this very value."""
    try:
        found = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return False
    return found is value


def _braced(text: str) -> str:
    """Double the braces of a text, so that `format` keeps them."""
    return text.replace("{", "{{").replace("}", "}}")


def _describe(value: Any) -> str:
    """Describe an object that has no text."""
    if isinstance(value, torch.Tensor):
        return f"a constant tensor, {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"an object of {type(value).__module__}.{type(value).__qualname__}: {value!r}"
