"""Checks of arguments: an error says the request (`asked`), the value `found`, and the remedy (`do`).

Checks run before anything changes. `error` is always the class of the error, a `StreamFXError`.
"""

from __future__ import annotations

import difflib
import inspect
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from streamfx.errors import OptionError, StreamFXError, with_article

P = ParamSpec("P")
R = TypeVar("R")
Refusal = type[StreamFXError]
MAX_VALUE_LENGTH = 80  # characters of a value in an error
BY_NAME = "write options={'chunk_size': 1024}, or name each option: chunk_size=1024"


def describe_value(value: Any) -> str:
    """Return a value and its type in one line; if the value takes more than `MAX_VALUE_LENGTH` characters, only its type.

    >>> describe_value(3), describe_value(int)
    ('3 (int)', 'the class int')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an object whose repr fails
        text = "an object"
    kind = type(value).__name__
    return f"{text} ({kind})" if len(text) <= MAX_VALUE_LENGTH else with_article(kind)


def did_you_mean(word: Any, allowed: Iterable[Any], cutoff: float = 0.4) -> str:
    """Return a hint at the `allowed` word that is closest to `word`, or at missing or superfluous quotes; "" if none is close.

    `cutoff` is the least similarity, from 0 to 1.

    >>> did_you_mean("chunk", ["chunk_size", "save"]), did_you_mean("x", ["save"])
    ("did you mean 'chunk_size'? ", '')
    >>> did_you_mean("True", ["auto", True]), did_you_mean(None, ["none", "sgd"]), did_you_mean(None, ["nose"])
    ('write True without quotes; ', "write 'none' in quotes; ", '')
    """
    words_by_text, text = {str(allowed_word).casefold(): allowed_word for allowed_word in allowed}, str(word).casefold()
    if text in words_by_text and isinstance(words_by_text[text], str) != isinstance(word, str):
        return f"write {words_by_text[text]!r} {'in' if isinstance(words_by_text[text], str) else 'without'} quotes; "
    closest = [] if word is None else difflib.get_close_matches(text, words_by_text, n=1, cutoff=cutoff)
    return f"did you mean {words_by_text[closest[0]]!r}? " if closest else ""


def choices_hint(word: Any, allowed: Collection[Any]) -> str:
    """Return a hint at the allowed words, for an argument that must be one of them.

    >>> choices_hint("DPO", ["sft", "dpo"])
    "did you mean 'dpo'? give one of sft, dpo"
    """
    return f"{did_you_mean(word, allowed)}give one of {', '.join(map(str, allowed))}"


def as_python_number(value: Any) -> Any:
    """Convert another kind of number, such as numpy's, to an int or a float; return any other value unchanged."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def require(holds: bool, error: Refusal, asked: str, found: Any, do: str) -> None:
    """Raise the error unless `holds` is true; `found` is the value found, or a text about it."""
    if not holds:
        raise error(asked, found=found if isinstance(found, str) else describe_value(found), do=do)


def check_call(error: Refusal, origin: str, kind: str = "argument", do: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a public function: if a call does not fit its signature, raise `error` in place of `TypeError`.

    `origin` names the function in the message, `kind` its keyword arguments ("option"), `do` is the remedy.
    """

    def decorator(function: Callable[P, R]) -> Callable[P, R]:
        """Return the function so that each call is checked against its signature first."""
        signature = inspect.signature(function)

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            """Check the call, and run the function."""
            try:
                signature.bind(*args, **kwargs)
            except TypeError as mismatch:
                raise _MismatchedCall(signature, args, kwargs, kind, do).as_error(error, origin, str(mismatch)) from None
            return function(*args, **kwargs)

        return checked

    return decorator


class _MismatchedCall:
    """A call that does not fit a signature, without its `self`."""

    def __init__(self, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], kind: str, do: str) -> None:
        """Store the parameters of the signature and the arguments of the call, both without `self`."""
        parameters = list(signature.parameters.values())
        skipped = int(bool(parameters) and parameters[0].name == "self")
        self.parameters, self.args, self.kwargs = parameters[skipped:], args[skipped:], kwargs
        self.kind, self.do = kind, do

    def as_error(self, error: Refusal, origin: str, mismatch: str) -> StreamFXError:
        """Return the error for the call: for options passed by position, for an unknown keyword, or else for all arguments.

        `mismatch` is Python's own message, which the last one quotes.
        """
        names = [parameter.name for parameter in self.parameters if parameter.kind is not parameter.VAR_KEYWORD]
        takes = f"it takes {', '.join(names)}" if names else "it takes no arguments"
        positional = [
            parameter
            for parameter in self.parameters
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        passed_options = [
            value for value in self.args[len(positional) :] if isinstance(value, Mapping) or hasattr(value, "given")
        ]
        if passed_options:  # options, as a mapping or as streamfx.Options
            found = f"{describe_value(passed_options[0])} as a positional argument"
            return OptionError(f"{origin} takes options by name", found=found, do=BY_NAME)
        unknown = next((name for name in self.kwargs if name not in names), None)
        if unknown is not None:
            found = f"{unknown}={describe_value(self.kwargs[unknown])}"
            return error(f"{origin} has no {self.kind} {unknown!r}", found=found, do=did_you_mean(unknown, names) + takes)
        passed_arguments = [
            *map(describe_value, self.args),
            *(f"{name}={describe_value(value)}" for name, value in self.kwargs.items()),
        ]
        asked = f"the arguments do not fit the signature of {origin}"
        return error(asked, found=f"{', '.join(passed_arguments) or 'none'}: {mismatch}", do=self.do or takes)
