"""Options of the backend: what they are called, what they may be, and where they come from."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from streamfx.argument_checks import BY_NAME, described, did_you_mean, plain, refusing
from streamfx.budget import FORMS, is_budget
from streamfx.errors import OptionError

ENVIRONMENT = "STREAMFX_OPTIONS"
OFFLOADS = ("inputs", "attention")  # what waits on the host, as levels of `save`
SAVE_LEVELS = ("inputs", "attention", "projections", "products")  # what a stage keeps, from little to much


@dataclass(frozen=True, kw_only=True)
class Options:
    """All options of `backend="streambp"`.

    Wherever options are taken, they may be a dictionary, or such an object: it stands for what it sets otherwise than by default.

    Args:
        chunk_size: rows of the sequence per chunk; "auto" lets the plan choose. A number is always obeyed.
        loss_chunk_size: the same for the stage that holds the head and the loss.
        save: what a stage keeps from its forward pass: "inputs" (only what enters it), "attention" (results and log-sum-exps of
            fused attention too, and what runs whole, so that neither is run twice), "projections" (queries, keys, values and
            the residual stream after the attention, too), "products" (results of all matrix products: nothing but element-wise
            work is repeated), "auto" (results of attention while they take at most half of what the model and its gradients
            take; with a budget, what the plan chooses).
        keep_every: how many stages share one kept input: with k, only each k-th stage's input is kept, and those between are
            made again in the backward half, by one more forward run of k - 1 stages in k; "auto" lets the plan choose.
        memory_budget: bytes that a step may take, parameters and gradients included: a number, "24GiB" or "24G", a share of the
            device's memory ("90%", 0.9), or "auto", what is free when the step is compiled; the plan makes the step as fast as
            it can be within it. None: chunks are small, memory is what it takes.
        offload: what waits on the host for the backward half (in pinned memory; on a CPU in memory-mapped files): "none";
            "inputs", the inputs of stages that are kept; "attention", these and all that `save="attention"` keeps, so that
            attention is not run twice and nothing of it stays on the device. "attention" implies `save="attention"` or more.
        bodies: who runs the loop bodies: "eager", "inductor", "auto".
        accumulate: type of gradient accumulators: "float32", or "same" as the gradient.
        reshard: whether whole weights of a sharded model are dropped behind the stage that used them, and gathered once more in
            the backward half (True), or kept for it (False); "auto" does as the code says (its checkpointing policies), and
            where it says nothing, drops all but those that the backward half begins with.
        outputs: "lazy" gives large outputs that are cheap to rebuild (logits) as tensors computed when touched, "dense" plain
            ones.
        gradients: when autograd gets them: "stagewise", as soon as those of a stage are there, so that what waits for them
            (DDP, an optimizer in the backward pass) runs between stages; "at once", at the end; "auto", stagewise where DDP or
            hooks on parameters wait.
        adjoints: how far the gradients of a recurrence reach back: "exact", or a number of rows, rounded up to chunks (truncated
            adjoint sharding): gradients are then not eager's, which `explain` says. It is for recurrences alone: attention and
            running sums stay exact.
        strict: raise instead of running a stage whole.
        check_passes: check what each pass has made, so that a fault of streamfx is found where it is made.
        progress: whether a line says what is done while compiling takes more than two seconds: "auto" where standard error is a
            terminal (it is erased at the end), True also where it is none (a line for each thing), False never.

    Raises:
        OptionError: a value that an option cannot have.

    Example:
        >>> import streamfx
        >>> streamfx.Options(chunk_size=512, memory_budget="24G").memory_budget
        '24G'
    """

    chunk_size: int | Literal["auto"] = "auto"
    loss_chunk_size: int | Literal["auto"] = "auto"
    save: Literal["inputs", "attention", "projections", "products", "auto"] = "auto"
    keep_every: int | Literal["auto"] = "auto"
    memory_budget: int | float | str | None = None
    offload: Literal["none", "inputs", "attention"] = "none"
    bodies: Literal["eager", "inductor", "auto"] = "auto"
    accumulate: Literal["float32", "same"] = "float32"
    reshard: bool | Literal["auto"] = "auto"
    outputs: Literal["lazy", "dense"] = "lazy"
    gradients: Literal["auto", "stagewise", "at once"] = "auto"
    adjoints: int | Literal["exact"] = "exact"
    strict: bool = False
    check_passes: bool = False
    progress: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))
            _check(field.name, getattr(self, field.name), "streamfx.Options(...)")
        _check_together(vars(self))

    def as_dict(self) -> dict[str, Any]:
        """All options by name.

        Returns:
            A dictionary that `options=` takes.

        Example:
            >>> import streamfx
            >>> streamfx.Options(chunk_size=512).as_dict()["outputs"]
            'lazy'
        """
        return asdict(self)

    def given(self) -> dict[str, Any]:
        """The options that are not what they are by default, by name.

        Returns:
            A dictionary that `options=` takes.

        Example:
            >>> import streamfx
            >>> streamfx.Options(chunk_size=512, memory_budget="24G").given()
            {'chunk_size': 512, 'memory_budget': '24G'}
        """
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}

    def ordering(self) -> str:
        """Those that the order of a graph's collectives may follow from, as text.

        Returns:
            A line that ranks compare.

        Example:
            >>> import streamfx
            >>> streamfx.Options(keep_every=2).ordering()  # doctest: +ELLIPSIS
            "save='auto', keep_every=2, ..."
        """
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in ORDERING)


if not TYPE_CHECKING:
    Options.__init__ = refusing(OptionError, "streamfx.Options(...)", "option")(Options.__init__)  # dataclass has written it

# what the order of a graph's collectives may follow from
ORDERING = ("save", "keep_every", "offload", "memory_budget", "reshard", "gradients")

ALLOWED: dict[str, tuple[Any, ...]] = {
    "save": (*SAVE_LEVELS, "auto"),
    "offload": ("none", *OFFLOADS),
    "bodies": ("eager", "inductor", "auto"),
    "accumulate": ("float32", "same"),
    "reshard": ("auto", True, False),
    "outputs": ("lazy", "dense"),
    "gradients": ("auto", "stagewise", "at once"),
    "strict": (True, False),
    "check_passes": (True, False),
    "progress": ("auto", True, False),
}
COUNTS = {  # options that are numbers of something, or a word
    "chunk_size": ("rows", "auto"),
    "loss_chunk_size": ("rows", "auto"),
    "keep_every": ("stages", "auto"),
    "adjoints": ("rows", "exact"),
}
NAMES = tuple(field.name for field in fields(Options))


def checked(options: Any, origin: str) -> dict[str, Any]:
    """The options as a dictionary of valid values; `origin` says in an error where they came from."""
    if options is None:
        return {}
    if isinstance(options, Options):
        return options.given()
    if not isinstance(options, Mapping):
        raise OptionError(
            f"{origin} must be a dictionary of options, or streamfx.Options",
            found=f"{options!r} ({type(options).__name__})",
            do=f"write for example {{'chunk_size': 1024}}; the options are {', '.join(NAMES)}",
        )
    given = {name: plain(value) for name, value in options.items()}
    for name, value in given.items():
        _check(name, value, origin)
    _check_together(given)
    return given


def merged(options: Any, keywords: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Options that were given as `options=` and by their names, as one dictionary; both may not say different things of one."""
    whole, named = checked(options, f"options= of {origin}"), checked(keywords, origin)
    for name in whole.keys() & named.keys():
        if whole[name] != named[name]:
            raise OptionError(
                f"{origin} was given the option {name!r} twice, with different values",
                found=f"{name}={named[name]!r}, and {whole[name]!r} in options=",
                do="give it once",
            )
    return {**whole, **named}


def _check(name: Any, value: Any, origin: str) -> None:
    if name not in NAMES:
        hint = did_you_mean(name, NAMES)
        raise OptionError(
            f"{origin} has no option {name!r}",
            found=f"{name}={value!r}",
            do=f"{hint}the options are {', '.join(NAMES)}",
        )
    if name in COUNTS:
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        things, word = COUNTS[name]
        if not is_count and not (isinstance(value, str) and value == word):
            raise OptionError(
                f"option {name!r} of {origin} cannot be {value!r}",
                found=f"{value!r} ({type(value).__name__})",
                do=f"give a whole number of {things}, 1 or more, or {word!r}",
            )
        return
    if name == "memory_budget":
        if not is_budget(value):
            raise OptionError(
                f"option {name!r} of {origin} cannot be {value!r}",
                found=f"{value!r} ({type(value).__name__})",
                do=f"give {FORMS}",
            )
        return
    allowed = ALLOWED[name]
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in allowed):
        hint = did_you_mean(value, allowed)
        raise OptionError(
            f"option {name!r} of {origin} cannot be {value!r}",
            found=f"{value!r} ({type(value).__name__})",
            do=f"{hint}allowed: {', '.join(map(repr, allowed))}",
        )


def _check_together(options: Mapping[str, Any]) -> None:
    """Refuse options that contradict each other, wherever each of them was given."""
    if options.get("offload") == "attention" and options.get("save") == "inputs":
        raise OptionError(
            "offload='attention' keeps results of attention on the host, and save='inputs' keeps none",
            found="save='inputs', offload='attention'",
            do="leave save out, or give offload='inputs'",
        )


def least_save(offload: str) -> str:
    """The lowest level of `save` that keeps all that is offloaded."""
    return "inputs" if offload == "none" else offload


def refuse_positional(values: Iterable[Any], origin: str) -> None:
    """Options are given by name everywhere, also where other arguments are a model's."""
    for value in values:
        if isinstance(value, Options):
            raise OptionError(f"{origin} takes options by name", found=f"{described(value)} among the arguments", do=BY_NAME)


def check_mode(mode: Any) -> None:
    """`torch.compile(..., mode=...)` names settings of Inductor; here there are none to name."""
    if mode not in (None, "default"):
        raise OptionError(
            f"backend='streambp' has no mode {mode!r}",
            found=f"torch.compile(..., mode={mode!r})",
            do="leave mode out; what can be set are options={...}: " + ", ".join(NAMES),
        )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a JSON object: of two values for one name, Python would take the last, and say nothing."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name in found if sum(name == other for other, _ in pairs) > 1)
        values = ", ".join(json.dumps(value) for name, value in pairs if name == twice)
        raise OptionError("each option once", found=f"{twice!r}: {values}")
    return found


def from_environment() -> dict[str, Any]:
    text = os.environ.get(ENVIRONMENT, "")
    if not text.strip():
        return {}
    origin = f"the environment variable {ENVIRONMENT}"
    try:
        options = json.loads(text, object_pairs_hook=_once)
    except OptionError as error:
        raise OptionError(f"{origin} has each option once", found=error.found, do="give it once") from None
    except json.JSONDecodeError as error:
        raise OptionError(
            f"{origin} must be JSON", found=f"{text!r}: {error}", do='write for example {"chunk_size": 1024}'
        ) from None
    return checked(options, origin)


def resolved(options: Any = None) -> Options:
    """The options of one compilation: `torch.compile`'s over `configure`'s over the environment's."""
    given = checked(options, "torch.compile(options=...)")
    return replace(Options(), **{**from_environment(), **_configured(), **given})


class _Layer:
    """Options that were set at one place. `decided` is set once it is known whether they are those of a block."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options, self.thread, self.decided, self.is_open = options, threading.get_ident(), threading.Event(), True


_of_process: list[_Layer] = []  # by calls
_of_context: ContextVar[tuple[_Layer, ...]] = ContextVar("streamfx_options", default=())  # by the blocks that this code is in


def _configured() -> dict[str, Any]:
    """What was set for the process, and over that what was set in the blocks around this code.

    What another thread has just set may be for a block that it is about to enter: it gets a moment to do so.
    """
    for layer in list(_of_process):
        if layer.thread != threading.get_ident():
            layer.decided.wait(1.0)
            layer.decided.set()
    layers = [*_of_process, *(layer for layer in _of_context.get() if layer.is_open)]
    return {name: value for layer in layers for name, value in layer.options.items()}


class configure:
    """Set options: called, for all compilations of the process that follow; as a context manager, for those inside of the block.

    A block holds for its own thread (and `asyncio` task) alone, and for those tasks that are begun in it. Once it is left, what
    it set is off, in whatever order blocks are left. What is compiled keeps the options that it was compiled with.

    Args:
        options: a dictionary of options, or `streamfx.Options`.
        keywords: options by their names (`chunk_size=512`); both may be given, if they do not contradict each other.

    Raises:
        OptionError: an option that does not exist, or a value that it cannot have; nothing is set then.

    Example:
        >>> import streamfx
        >>> with streamfx.configure(chunk_size=512):
        ...     streamfx.options.resolved().chunk_size
        512
    """

    @refusing(OptionError, "streamfx.configure(...)")
    def __init__(self, *, options: Any = None, **keywords: Any) -> None:
        from_environment()  # a bad one would be said at the first call of a model
        self._options = merged(options, keywords, "streamfx.configure(...)")
        self._called = _Layer(self._options)
        self._blocks: list[_Layer] = []
        _of_process.append(self._called)

    def __enter__(self) -> configure:
        if self._called in _of_process:
            _of_process.remove(self._called)
        self._called.decided.set()
        self._blocks.append(_Layer(self._options))
        _of_context.set((*_of_context.get(), self._blocks[-1]))
        return self

    def __exit__(self, *exception: object) -> None:
        left = self._blocks.pop()
        left.is_open = False  # where a block is left in another context than it was entered in, too
        _of_context.set(tuple(layer for layer in _of_context.get() if layer is not left))

    def __del__(self) -> None:
        if called := getattr(self, "_called", None):  # not there where options were refused
            called.decided.set()  # no block follows
