"""What is public says what it takes, gives and raises, and shows an example that runs."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest

import streamfx


def public() -> Iterator[tuple[str, Any]]:
    """Functions and classes that `dir(streamfx)` shows, and their methods, those of base classes of ours included."""
    for name in streamfx.__all__:
        own = getattr(streamfx, name)
        yield name, own
        if isinstance(own, type):
            methods = inspect.getmembers(own, inspect.isfunction)
            yield from (
                (f"{name}.{key}", it) for key, it in methods if not key.startswith("_") and it.__module__.startswith("streamfx.")
            )


PUBLIC = dict(public())
PROPERTIES = {
    f"{name}.{key}": it
    for name in streamfx.__all__
    for key, it in inspect.getmembers(getattr(streamfx, name), lambda it: isinstance(it, property))
    if not key.startswith("_")
}


def section(documented: Any, title: str) -> str | None:
    """What stands, indented, below a line such as `Args:`."""
    found = re.search(rf"^{title}:\n((?:[ ]+.*\n|\n(?=[ ]))*)", f"{inspect.getdoc(documented)}\n", re.M)
    return found and found[1]


def inherits_how_it_is_made(documented: Any) -> bool:
    """An error is made as the base of all errors, whose docstring says how."""
    return isinstance(documented, type) and "__init__" not in vars(documented)


def parameters(documented: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(documented).parameters if name != "self"]


def names(text: str) -> list[str]:
    """What the entries of a section are about; one may be about several.

    >>> names("    a, b: numbers\\n        of things\\n    c: more: text\\n")
    ['a', 'b', 'c']
    """
    entries = re.findall(r"^    (\w[\w, ]*):", text, re.M)
    return [name.strip() for entry in entries for name in entry.split(",")]


@pytest.mark.parametrize("name", PUBLIC)
def test_its_example_runs(name: str) -> None:
    text = section(PUBLIC[name], "Example")
    assert text and ">>> " in text, f"{name} has no example"
    parsed = doctest.DocTestParser().get_doctest(inspect.cleandoc(text), {}, name, None, None)
    told: list[str] = []
    doctest.DocTestRunner(verbose=False).run(parsed, out=told.append)
    assert not told, "".join(told)


@pytest.mark.parametrize("name", [name for name, own in PUBLIC.items() if not inherits_how_it_is_made(own)])
def test_every_parameter_is_named(name: str) -> None:
    assert sorted(names(section(PUBLIC[name], "Args") or "")) == sorted(parameters(PUBLIC[name]))


def test_every_option_is_named() -> None:
    assert names(section(streamfx.Options, "Args") or "") == [field.name for field in fields(streamfx.Options)]


@pytest.mark.parametrize("name", [name for name, own in PUBLIC.items() if inspect.isfunction(own)])
def test_it_says_what_it_returns(name: str) -> None:
    returns_nothing = inspect.signature(PUBLIC[name]).return_annotation in (None, "None")
    assert bool(section(PUBLIC[name], "Returns")) != returns_nothing


@pytest.mark.parametrize("name", PUBLIC)
def test_errors_that_it_raises_are_public(name: str) -> None:
    text = section(PUBLIC[name], "Raises")
    raised = names(text or "")
    assert all(issubclass(getattr(streamfx, error), streamfx.StreamFXError) for error in raised)
    assert bool(raised) == (text is not None)


@pytest.mark.parametrize("name", PROPERTIES)
def test_what_can_be_read_says_what_it_is(name: str) -> None:
    assert inspect.getdoc(PROPERTIES[name])
