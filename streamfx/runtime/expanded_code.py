"""Generate Python source for a list of calls, so that no interpreter iterates over them at run time.

    def outer(arguments):
        try:
            [x, weight] = arguments
            arguments.clear()
            mm = run_0(x, weight)
            x = weight = None
            return (mm,)
        except Exception as error:
            failed(error)
            raise

The calls are operators, loops over chunks, or compiled subgraphs. Each value is a local variable, named like its node, which is
set to None after its last use. The generated code holds no state of a run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from keyword import iskeyword
from typing import Any, Protocol

from torch import fx

from streamfx.runtime.error_location import name_line

LITERAL_TYPES = (int, bool, str, type(None))  # types whose repr is valid source; values of other types are referenced by name
_numbers = count()


@dataclass(frozen=True)
class CodeCall:
    """A call in generated code, `outputs = run(*args, **kwargs)`; nodes among the arguments represent values.

    `outputs` is one node for the result, or several nodes for the items of the result. `executed` are the operators that
    this call runs, one after the other: all operators of the body if it calls a loop.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: fx.Node | tuple[fx.Node, ...]
    executed: tuple[fx.Node, ...] = ()

    @property
    def defs(self) -> tuple[fx.Node, ...]:
        return (self.outputs,) if isinstance(self.outputs, fx.Node) else self.outputs

    @property
    def uses(self) -> list[fx.Node]:
        return nodes_in((self.args, self.kwargs))


class CodeStep(Protocol):
    """A step of the generated function: it defines the values `defs` and reads the values `uses`."""

    @property
    def defs(self) -> tuple[fx.Node, ...]: ...

    @property
    def uses(self) -> list[fx.Node]: ...


def nodes_in(arguments: Any) -> list[fx.Node]:
    """Return the nodes among nested arguments, in order; a node that occurs twice is returned twice."""
    nodes: list[fx.Node] = []

    def visit(node: fx.Node) -> fx.Node:
        """Collect a node, and keep it unchanged."""
        nodes.append(node)
        return node

    fx.node.map_arg(arguments, visit)
    return nodes


class FunctionText:
    """The lines of a function, and the objects that its names refer to."""

    def __init__(self, reserved: Iterable[str]) -> None:
        """Start an empty function; `reserved` are names in use, which `unused` does not return."""
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}  # globals of the function
        self.nodes_by_line: dict[int, tuple[fx.Node, ...]] = {}  # by line number, the operators that the line runs
        self._reserved_names = set(reserved)
        self._next: Counter[str] = Counter()  # by hint: the first suffix that may be free

    def line(self, text: str, depth: int = 1) -> None:
        """Append a line, indented by `depth` levels."""
        self.lines.append("    " * depth + text)

    def unused(self, hint: str) -> str:
        """Reserve and return a name that is not in use: `hint` with a number."""
        while (name := f"{hint}_{self._next[hint]}") in self._reserved_names:
            self._next[hint] += 1
        self._reserved_names.add(name)
        return name

    def name(self, hint: str, value: Any) -> str:
        """Add an object to the function's globals under a new name, and return the name."""
        name = self.unused(hint)
        self.names[name] = value
        return name

    def argument(self, value: Any) -> str:
        """Return an argument of a call as Python source: a node as its name, a literal as itself.

        Collections that contain nodes, and lists, are written out; other objects become globals of the function.
        """
        if isinstance(value, fx.Node):
            return value.name
        if type(value) in LITERAL_TYPES or (type(value) is float and math.isfinite(value)):
            return repr(value)
        if nodes_in((value,)) or type(value) in (
            list,
            fx.immutable_collections.immutable_list,
        ):  # a list is copied, because the callee may mutate it
            return self._collection(value)
        return self.name("value", value)

    def _collection(self, value: Any) -> str:
        """Return a dict, slice, list, tuple or named tuple as Python source."""
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self.argument(item)}" for key, item in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self.argument, (value.start, value.stop, value.step)))})"
        items = "".join(f"{self.argument(item)}, " for item in value)
        if isinstance(value, list):
            return f"[{items}]"
        return f"{self.name('kind', type(value))}({items})" if hasattr(value, "_fields") else f"({items})"

    def function(self, title: str) -> Callable[..., Any]:
        """Compile the lines, which define a function `title`, and return the function; tracebacks show the source."""
        source, file = "\n".join(self.lines) + "\n", f"streamfx's {title}, {next(_numbers)}"
        namespace = {**self.names, "__name__": file, "__loader__": _Source(source)}
        exec(compile(source, file, "exec"), namespace)
        function: Callable[..., Any] = namespace[title]
        return function


@dataclass(frozen=True)
class _Source:
    """A loader from which `linecache` reads source lines."""

    text: str

    def get_source(self, name: str) -> str:
        return self.text


def generate_function(
    title: str, inputs: Sequence[fx.Node], calls: Sequence[CodeCall], result: Any, boxed: bool = False
) -> Callable[..., Any]:
    """Generate a function that runs calls in order and returns `result`.

    It takes the values of `inputs` as positional arguments; if `boxed`, in one list, which it empties.
    """
    text = FunctionText(node.name for node in (*inputs, *(node for call in calls for node in call.defs)))
    names, arguments = ", ".join(node.name for node in inputs), text.unused("arguments")
    text.line(f"def {title}({arguments if boxed else names}):", 0)
    text.line("try:")
    if boxed:
        text.line(f"[{names}] = {arguments}", 2)
        text.line(f"{arguments}.clear()", 2)
    dead_first, *dead_after = dead_values(inputs, calls, result)
    write_drop(text, dead_first)
    write_calls(text, calls, dead_after)
    text.line(f"return {text.argument(result)}", 2)
    write_except(text)
    return text.function(title)


def write_calls(text: FunctionText, calls: Sequence[CodeCall], dead_after: Sequence[Sequence[fx.Node]]) -> None:
    """Append the lines that run these calls; each is followed by the line that drops the values of `dead_after` for it."""
    for call, values in zip(calls, dead_after, strict=True):
        _write_call(text, call)
        write_drop(text, values)


def _write_call(text: FunctionText, call: CodeCall) -> None:
    """Append the line that runs a call and assigns its results, for example `[a, b] = run_0(x, dim=1)`.

    Arguments whose name is a keyword of Python (`from`) are passed as `**{"from": ...}`.
    """
    keywords = {key: text.argument(item) for key, item in call.kwargs.items()}
    arguments = [text.argument(item) for item in call.args] + [
        f"{key}={item}" for key, item in keywords.items() if not iskeyword(key)
    ]
    arguments += [f"**{{{key!r}: {item}}}" for key, item in keywords.items() if iskeyword(key)]
    targets = call.outputs.name if isinstance(call.outputs, fx.Node) else f"[{', '.join(node.name for node in call.outputs)}]"
    text.line(f"{targets} = {text.name('run', call.run)}({', '.join(arguments)})", 2)
    text.nodes_by_line[len(text.lines)] = call.executed


def write_drop(text: FunctionText, values: Sequence[fx.Node]) -> None:
    """Append the line that sets these values to None (`a = b = None`), so that their memory can be freed; none if empty."""
    if values:
        text.line(" = ".join([*(node.name for node in values), "None"]), 2)


def write_except(text: FunctionText) -> None:
    """Write the `except` clause that closes `try`; it adds the user's source line to an error, found by the generated line."""
    nodes_by_line = text.nodes_by_line

    def on_error(error: Exception) -> None:
        """Name the user's line for the operators of the generated line that raised."""
        trace = error.__traceback__
        name_line(error, nodes_by_line.get(trace.tb_lineno, ()) if trace is not None else ())

    name = text.unused("error")
    text.line(f"except Exception as {name}:")
    text.line(f"{text.name('failed', on_error)}({name})", 2)
    text.line("raise", 2)


def dead_values(inputs: Sequence[fx.Node], calls: Sequence[CodeStep], result: Any) -> list[list[fx.Node]]:
    """Return the values that are not used any more: a list for before the first call, then one for after each call.

    Values that `result` contains stay.
    """
    last: dict[fx.Node, int] = dict.fromkeys(inputs, -1)
    for index, call in enumerate(calls):
        last.update(dict.fromkeys((*call.uses, *call.defs), index))
    last.update(dict.fromkeys(nodes_in((result,)), len(calls)))
    dead_after: list[list[fx.Node]] = [[] for _ in range(len(calls) + 2)]
    for node, index in last.items():
        dead_after[index + 1].append(node)
    return dead_after[:-1]
