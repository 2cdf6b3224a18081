"""Options of the backend: their names, their values, and the places where they are set.

Options of one call of `torch.compile` override those that `configure` sets, which override the environment variable. Each call
of `configure` sets a *layer* of options: of the process, or, as a context manager, of a block of code. Later layers override
earlier ones. An `origin` is the text that names the place of an option in an error.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from streamfx.argument_checks import BY_NAME, as_python_number, check_call, describe_value, did_you_mean
from streamfx.budget import FORMS, is_budget
from streamfx.errors import OptionError

ENVIRONMENT = "STREAMFX_OPTIONS"
OFFLOADS = ("inputs", "attention")  # values to keep on the host, as levels of `save`
SAVE_LEVELS = ("inputs", "attention", "projections", "products")  # values that a stage keeps, from few to many


@dataclass(frozen=True, kw_only=True)
class Options:
    """All options of `backend="streambp"`.

    Every function that takes options accepts a dictionary or an `Options` object, of which only non-default values count.

    Args:
        chunk_size: rows of the sequence per chunk; "auto" lets the plan choose. A number is always obeyed.
        loss_chunk_size: the same for the stage with the head and the loss.
        save: the forward values that a stage keeps: "inputs" (only its inputs), "attention" (also results and log-sum-exps of
            fused attention, and values that are not chunked, so that neither is computed twice), "projections" (also queries,
            keys, values, and the residual stream after the attention), "products" (results of all matrix products: only
            element-wise operators are recomputed), "auto" (attention results, if they take at most half of the memory of the
            model and its gradients; with a budget, the plan chooses).
        keep_every: how many stages share one kept input: with k, only the input of each k-th stage is kept, and the backward
            graph recomputes the inputs between, by one more forward run of k - 1 stages in k; "auto" lets the plan choose.
        memory_budget: bytes that a step may take, parameters and gradients included: a number, "24GiB" or "24G", a share of the
            device's memory ("90%", 0.9), or "auto", the free memory when the step is compiled; the plan makes the step as fast as
            possible within it. None: chunks are small, and memory is not limited.
        offload: forward values to keep in host memory until the backward graph (pinned memory; on a CPU, memory-mapped files):
            "none"; "inputs", the kept inputs of stages (with FSDP2, of wrapped modules); "attention", these and everything that
            `save="attention"` keeps, so that attention runs once and its results leave the device. "attention" implies
            `save="attention"` or more.
        bodies: the compiler of the loop bodies: "eager"; "inductor", for which the first step waits; "auto", Inductor if a step
            is long enough (on a CPU, bodies run eagerly until another process has compiled them).
        accumulate: dtype of gradient accumulators: "float32", or "same" as the gradient.
        reshard: whether the full weights of a sharded model are freed after each stage and gathered again in the backward graph
            (True), or kept for it (False); "auto" follows the code (its checkpointing policies), and otherwise frees all weights
            except the first ones that the backward graph needs.
        outputs: "lazy" returns large outputs that are cheap to recompute (logits) as tensors computed at first use, "dense" as
            plain tensors.
        gradients: when autograd gets them: "stagewise", as soon as a stage's are complete, so that their consumers (DDP, an
            optimizer in the backward pass) run between stages; "at once", at the end; "auto", stagewise if DDP or hooks on
            parameters consume them, or if they are added to gradients of an earlier backward pass.
        adjoints: how far the gradients of a recurrence reach back: "exact", or a number of rows, rounded up to chunks
            (truncated adjoint sharding): gradients then differ from eager's, as `explain` reports. It affects recurrences
            alone: attention and running sums stay exact.
        strict: raise an error if a stage cannot be chunked.
        check_passes: check the result of each pass, to find a bug in streamfx at its origin.
        progress: whether to show activities if compilation takes more than two seconds: "auto" if standard error is a terminal
            (the line is erased at the end), True also if it is not (one line per activity), False never.

    Raises:
        OptionError: an option has an invalid value.

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
        """Check each option, and that options do not contradict each other."""
        for field in fields(self):
            object.__setattr__(self, field.name, as_python_number(getattr(self, field.name)))
            _check(field.name, getattr(self, field.name), "streamfx.Options(...)")
        _check_together(vars(self))

    def as_dict(self) -> dict[str, Any]:
        """Return all options by name.

        Returns:
            A dictionary that `options=` takes.

        Example:
            >>> import streamfx
            >>> streamfx.Options(chunk_size=512).as_dict()["outputs"]
            'lazy'
        """
        return asdict(self)

    def given(self) -> dict[str, Any]:
        """Return the options with non-default values, by name.

        Returns:
            A dictionary that `options=` takes.

        Example:
            >>> import streamfx
            >>> streamfx.Options(chunk_size=512, memory_budget="24G").given()
            {'chunk_size': 512, 'memory_budget': '24G'}
        """
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}

    def ordering(self) -> str:
        """Return the options on which the order of a graph's collectives may depend, as text.

        Returns:
            A line that ranks compare.

        Example:
            >>> import streamfx
            >>> streamfx.Options(keep_every=2).ordering()  # doctest: +ELLIPSIS
            "save='auto', keep_every=2, ..."
        """
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in ORDERING)


if not TYPE_CHECKING:
    Options.__init__ = check_call(OptionError, "streamfx.Options(...)", "option")(Options.__init__)  # generated by dataclass

# options on which the order of a graph's collectives may depend
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
COUNTS = {  # options that are a count or a word: the unit, and the word
    "chunk_size": ("rows", "auto"),
    "loss_chunk_size": ("rows", "auto"),
    "keep_every": ("stages", "auto"),
    "adjoints": ("rows", "exact"),
}
NAMES = tuple(field.name for field in fields(Options))


def validate_options(options: Any, origin: str) -> dict[str, Any]:
    """Return options (a mapping, `Options` or None) as a dictionary of valid values; of `Options`, only non-default values.

    Raise `OptionError` if an option does not exist, is invalid or contradicts another; `origin` names their source there.
    """
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
    values = {name: as_python_number(value) for name, value in options.items()}
    for name, value in values.items():
        _check(name, value, origin)
    _check_together(values)
    return values


def merge_options(options: Any, keywords: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the options passed as `options=` and by name (`keywords`), checked, as one dictionary.

    Raise `OptionError` if one is invalid, or given twice with different values.
    """
    from_options, named = validate_options(options, f"options= of {origin}"), validate_options(keywords, origin)
    for name in from_options.keys() & named.keys():
        if from_options[name] != named[name]:
            raise OptionError(
                f"{origin} was given the option {name!r} twice, with different values",
                found=f"{name}={named[name]!r}, and {from_options[name]!r} in options=",
                do="give it once",
            )
    return {**from_options, **named}


def _check(name: Any, value: Any, origin: str) -> None:
    """Raise `OptionError` if there is no option `name`, or it cannot have this value; `origin` names where it was set."""
    if name not in NAMES:
        hint = did_you_mean(name, NAMES)
        raise OptionError(
            f"{origin} has no option {name!r}",
            found=f"{name}={value!r}",
            do=f"{hint}the options are {', '.join(NAMES)}",
        )
    if name in COUNTS:
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        unit, allowed_word = COUNTS[name]
        if not is_count and not (isinstance(value, str) and value == allowed_word):
            raise OptionError(
                f"option {name!r} of {origin} cannot be {value!r}",
                found=f"{value!r} ({type(value).__name__})",
                do=f"give a whole number of {unit}, 1 or more, or {allowed_word!r}",
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
    """Raise `OptionError` if two of these options contradict each other."""
    if options.get("offload") == "attention" and options.get("save") == "inputs":
        raise OptionError(
            "offload='attention' keeps results of attention on the host, and save='inputs' keeps none",
            found="save='inputs', offload='attention'",
            do="omit save, or give offload='inputs'",
        )


def min_save_level(offload: str) -> str:
    """Return the lowest level of the option `save` that keeps all values which the option `offload` moves to the host."""
    return "inputs" if offload == "none" else offload


def refuse_positional(values: Iterable[Any], origin: str) -> None:
    """Raise `OptionError` if an `Options` object is among positional arguments, for example those of a model's call."""
    for value in values:
        if isinstance(value, Options):
            raise OptionError(f"{origin} takes options by name", found=f"{describe_value(value)} among the arguments", do=BY_NAME)


def check_mode(mode: Any) -> None:
    """Raise `OptionError` for any `torch.compile(..., mode=...)` but the default: modes are settings of Inductor."""
    if mode not in (None, "default"):
        raise OptionError(
            f"backend='streambp' has no mode {mode!r}",
            found=f"torch.compile(..., mode={mode!r})",
            do="omit mode; the options are options={...}: " + ", ".join(NAMES),
        )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the (name, value) pairs of a JSON object as a dictionary.

    Raise `OptionError` if a name is repeated, of which Python would silently take the last value.
    """
    options = dict(pairs)
    if len(options) < len(pairs):
        repeated = next(name for name in options if sum(name == other_name for other_name, _ in pairs) > 1)
        values = ", ".join(json.dumps(value) for name, value in pairs if name == repeated)
        raise OptionError("give each option once", found=f"{repeated!r}: {values}")
    return options


def environment_options() -> dict[str, Any]:
    """Return the options in the environment variable `STREAMFX_OPTIONS` (a JSON object); empty if it is not set.

    Raise `OptionError` if it is not JSON, or an option is invalid.
    """
    text = os.environ.get(ENVIRONMENT, "")
    if not text.strip():
        return {}
    origin = f"the environment variable {ENVIRONMENT}"
    try:
        options = json.loads(text, object_pairs_hook=_without_duplicates)
    except OptionError as error:
        raise OptionError(f"{origin} must have each option once", found=error.found, do="give it once") from None
    except json.JSONDecodeError as error:
        raise OptionError(
            f"{origin} must be JSON", found=f"{text!r}: {error}", do='write for example {"chunk_size": 1024}'
        ) from None
    return validate_options(options, origin)


def resolve_options(options: Any = None) -> Options:
    """Return all options of one compilation.

    `options` (of `torch.compile`) override those that `configure` has set, which override those of the environment variable.
    """
    own_options = validate_options(options, "torch.compile(options=...)")
    return replace(Options(), **{**environment_options(), **_configured(), **own_options})


class _OptionLayer:
    """Options that one call of `configure` sets, for the process or for a `with` block (until `is_open` is False).

    The event `decided` is set once it is known whether a block follows the call.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Store the options, and the thread that sets them."""
        self.options, self.thread, self.decided, self.is_open = options, threading.get_ident(), threading.Event(), True


_process_layers: list[_OptionLayer] = []  # by calls of `configure`
_context_layers: ContextVar[tuple[_OptionLayer, ...]] = ContextVar(
    "streamfx_options", default=()
)  # by the blocks around the current code


def _configured() -> dict[str, Any]:
    """Return the options that `configure` has set: layers of the process, overridden by layers of the blocks around this code.

    Options that another thread has just set may belong to a block that it is about to enter: wait up to a second for that.
    """
    for layer in list(_process_layers):
        if layer.thread != threading.get_ident():
            layer.decided.wait(1.0)
            layer.decided.set()
    layers = [*_process_layers, *(layer for layer in _context_layers.get() if layer.is_open)]
    return {name: value for layer in layers for name, value in layer.options.items()}


class configure:
    """Set options: a call sets them for all later compilations of the process, a context manager for those in its block.

    A block applies to its own thread (and `asyncio` task) and to tasks started in it. Its options end with it, in
    whatever order blocks end. A compiled function keeps the options with which it was compiled.

    Args:
        options: a dictionary of options, or `streamfx.Options`.
        keywords: options by name (`chunk_size=512`); both may be given, if they do not contradict each other.

    Raises:
        OptionError: an option does not exist, or has an invalid value; then nothing is set.

    Example:
        >>> import streamfx
        >>> with streamfx.configure(chunk_size=512):
        ...     streamfx.options.resolve_options().chunk_size
        512
    """

    @check_call(OptionError, "streamfx.configure(...)")
    def __init__(self, *, options: Any = None, **keywords: Any) -> None:
        """Set the options for the process, as a layer that `__enter__` replaces by one of a block, if a block follows."""
        environment_options()  # raises now rather than at the first call of a model
        self._options = merge_options(options, keywords, "streamfx.configure(...)")
        self._process_layer = _OptionLayer(self._options)
        self._blocks: list[_OptionLayer] = []
        _process_layers.append(self._process_layer)

    def __enter__(self) -> configure:
        """Set the options for the block that begins: replace the layer of the process by a layer of this context.

        Other threads, which wait to know whether a block follows (`decided`), go on.
        """
        if self._process_layer in _process_layers:
            _process_layers.remove(self._process_layer)
        self._process_layer.decided.set()
        self._blocks.append(_OptionLayer(self._options))
        _context_layers.set((*_context_layers.get(), self._blocks[-1]))
        return self

    def __exit__(self, *exception: object) -> None:
        """Remove the layer of options of the block that ends."""
        ended_block = self._blocks.pop()
        ended_block.is_open = False  # also in contexts that copied the layers of this one
        _context_layers.set(tuple(layer for layer in _context_layers.get() if layer is not ended_block))

    def __del__(self) -> None:
        """End the waiting of other threads for a block (`_configured`): none follows if this object is deleted."""
        if process_layer := getattr(self, "_process_layer", None):  # missing if options were refused
            process_layer.decided.set()  # no block follows
