"""Decoders drawn to hurt: for each kind of fault that was found once, the choices that lead there, drawn freely."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

from tests.random_decoders import extras as terms
from tests.random_decoders.choices import Choices
from tests.random_decoders.extras import BYTES, EXTRAS, FEATURES, FEW
from tests.random_decoders.gradients import KNOWN_EARLY, RECOMPUTED, SEVERAL_HEADS
from tests.random_decoders.masks import FILLS
from tests.random_decoders.mixers import DECAYS, MIXES, SCANS, STATEFUL, TREES, WHOLE
from tests.random_decoders.of_rows import BUFFERS, COMPRESSED, CUT_OUT, LOOPS, ORDERS, SQUARES, TABLES
from tests.random_decoders.picked import PICKED
from tests.random_decoders.specification import CALLS, OUTSIDE, Decoder, Layer, draw, drawn, sensible

SCORES = ("matmul", "einsum", "biased")
PLACES_OF_MIXES = ("mixed_before_norm", "mixed_after_norm", "mixed_logits")


def _first(decoder: Decoder, **choices: Any) -> Decoder:
    return replace(decoder, layers=(replace(decoder.layers[0], **choices), *decoder.layers[1:]), precision="float64")


def _layers(choose: Choices, count: int) -> list[Choices]:
    return [choose.within(f"layer {number}") for number in range(count)]


def _small(decoder: Decoder) -> Decoder:
    """Compiled ones take longest: one layer, nothing that is only slow."""
    return replace(decoder, layers=(replace(decoder.layers[0], mixer="none"),), bodies="eager")


def _arithmetic(decoder: Decoder, choose: Choices, *names: str) -> Decoder:
    own = drawn(Layer, choose, *names)
    core = choose("core", ("boolean", *SCORES))
    return _first(decoder, mask="arithmetic", core=core, hiding=choose("hiding", ("fill", "where", *FILLS)), bent="none", **own)


def _arguments(decoder: Decoder, choose: Choices) -> Decoder:
    return _arithmetic(decoder, choose, "apart", "relation", "together")


def _wraps(decoder: Decoder, choose: Choices) -> Decoder:
    return _arithmetic(decoder, choose, "positions", "apart", "relation", "together")


def _ordinary(decoder: Decoder, choose: Choices) -> Decoder:
    own = drawn(Layer, choose, "bent", "table", "bent_last")
    mask = choose("mask", ("arange", "tril", "triu", "window", "padding", "buffer", "packed"))
    return _first(decoder, core=choose("core", SCORES), mask=mask, hiding=choose("hiding", FILLS), sinks="none", **own)


def _passes(decoder: Decoder, choose: Choices) -> Decoder:
    return replace(
        _small(decoder), outputs="logits", loss=choose("loss", OUTSIDE), precision="float64", extra="none", bend="none"
    )


def _threads(decoder: Decoder, choose: Choices) -> Decoder:
    return _called(decoder, "threads")


def _changes(decoder: Decoder, choose: Choices) -> Decoder:
    return _called(decoder, choose("calls", [way for way in CALLS if way.startswith(("buffer", "late"))]))


def _lengths(decoder: Decoder, choose: Choices) -> Decoder:
    return _called(decoder, choose("calls", ("lengths", "configured")))


def _called(decoder: Decoder, way: str) -> Decoder:
    return replace(_small(decoder), calls=way, extra="none", bend="none", dynamic=False)


def _stages(decoder: Decoder, choose: Choices) -> Decoder:
    """Two layers, so that there is a stretch between; weights that are used twice, and inputs that join between."""
    own = _features(decoder, choose)
    if choose.chance("no features", 0.5):
        own = replace(own, features="none", embedding=choose("embedding", ("tokens", "tied", "positions", "two tables")))
    way = choose("calls", [way for way in CALLS if way.startswith("stages")])
    return replace(_called(own, way), layers=own.layers, keep_every=choose("keep_every", (1, 2, 3)))


def _linear(decoder: Decoder, choose: Choices) -> Decoder:
    return replace(decoder, scale=choose("scale", (5, 0.3)), extra="none", **drawn(Decoder, choose, "bend", "bend_at"))


def _casts(decoder: Decoder, choose: Choices) -> Decoder:
    if choose.chance("an extra", 0.5):
        return replace(decoder, bend="none", **drawn(Decoder, choose, "extra"))
    own = drawn(Layer, choose, "counts" if choose.chance("groups are counted", 0.7) else "keys_of_experts")
    return replace(
        _first(decoder, mlp="sorted experts", **own), batch=choose("batch", (3, 5)), length=choose("length", (13, 19, 37))
    )


def _bytes(decoder: Decoder, choose: Choices) -> Decoder:
    """As many experts as a byte has numbers, sorted by these."""
    layer = replace(decoder.layers[0], mlp="sorted experts", counts="plain", keys_of_experts=choose("keys_of_experts", BYTES))
    return replace(_small(decoder), layers=(layer,), length=choose("length", (13, 19, 37)), extra="none", bend="none")


def _operands(decoder: Decoder, choose: Choices) -> Decoder:
    names = [name for name in EXTRAS if name.startswith(("odd", "signs", "heads", "shifted"))]
    return replace(decoder, bend="none", extra=choose("extra", names))


def _beside(decoder: Decoder, choose: Choices, extras: Collection[str]) -> Decoder:
    return replace(decoder, bend="none", extra=choose("extra", extras))


def _features(decoder: Decoder, choose: Choices) -> Decoder:
    """An input joins the stream between two layers: its gradient is part of what the one leaves and the other takes."""
    first, features = replace(decoder.layers[0], mixer="none"), choose("features", FEATURES)
    second = drawn(Layer, choose.within("layer 1"), "core", "mlp")
    layers = (first, replace(first, **second))
    return replace(decoder, layers=layers, embedding="given", features=features, calls="one", extra="none", bend="none")


def _whole(decoder: Decoder, choose: Choices) -> Decoder:
    """Several layers have something that runs whole: the backward half makes it again, a layer at a time."""
    layers = [
        replace(decoder.layers[0], mixer=own("mixer", (*WHOLE, "none")), **drawn(Layer, own, "core", "mlp", "wiring", "mask"))
        for own in _layers(choose, choose("count", (2, 3)))
    ]
    lengths = {"calls": "lengths", "dynamic": True} if choose.chance("lengths", 0.2) else {"calls": "one"}
    return replace(decoder, layers=tuple(layers), extra="none", bend="none", bodies="eager", precision="float64", **lengths)


def _scans(decoder: Decoder, choose: Choices, mixers: Collection[str] = tuple(SCANS)) -> Decoder:
    """A loop over rows that is one operator, whose steps are functions, or hands on a state; often of any length."""
    layers = [
        replace(decoder.layers[0], mixer=own("mixer", mixers), **drawn(Layer, own, "core", "mlp", "wiring"))
        for own in _layers(choose, choose("count", (1, 2)))
    ]
    lengths: dict[str, Any] = {"calls": "one", "length": max(decoder.length, 3)}  # eager scans no rows either
    if choose.chance("lengths", 0.3):
        lengths = {"calls": "lengths", "dynamic": True, "length": choose("length", (5, 7, 11))}
    own: dict[str, Any] = {
        "extra": "none",
        "bend": "none",
        "bodies": "eager",
        "precision": "float64",
        "compiled": True,
        **lengths,
    }
    return replace(decoder, layers=tuple(layers), adjoints=choose("adjoints", ("exact", "all")), **own)


def _of_any_length(decoder: Decoder, choose: Choices, extras: Collection[str]) -> Decoder:
    own = _beside(replace(_small(decoder), calls="lengths", dynamic=True), choose, extras)
    return replace(own, length=choose("length", (5, 6, 7, 11, 19)), bodies=choose("bodies", ("eager", "inductor")))


def _views(decoder: Decoder, choose: Choices) -> Decoder:
    """Views of what is returned are returned, too: of any length they begin where sizes say."""
    own = replace(_small(decoder), calls="lengths", dynamic=True, outputs="views", layout="batch first", loss="mean")
    return replace(own, length=choose("length", (5, 11, 19)), bodies="eager")


def _square(decoder: Decoder, choose: Choices) -> Decoder:
    """Rows of a few widths: as many as make whole blocks, or a row more or less."""
    width = decoder.width
    length = choose("blocks", (2, 3, width)) * width + (choose("rows more", (1, -1)) if choose.chance("not whole", 0.4) else 0)
    own = _beside(decoder, choose, SQUARES)
    return replace(own, length=min(length, 37))


def _alone(decoder: Decoder, choose: Choices) -> Decoder:
    """Logits much wider than what they are made of, behind what mixes rows, or does not; rows of them are read alone."""
    first = choose("place", PLACES_OF_MIXES)
    second = choose("second place", PLACES_OF_MIXES) if choose.chance("two places", 0.5) else first
    mixes: dict[str, Any] = {name: choose(name, MIXES) for name in (first, second)}
    sizes: dict[str, Any] = {"heads": 1, "head_size": 2, "vocabulary": choose("vocabulary", (5, 8, 11, 13))}
    sizes |= {"length": choose("length", (2, 3, 5, 8, 11, 13)), "batch": choose("batch", (1, 2, 3, 5))}
    return replace(_called(decoder, "rows"), outputs="logits", loss="mean", scale=1, **mixes, **sizes)


def _cut_out(decoder: Decoder, choose: Choices) -> Decoder:
    """Lengths of three blocks at least."""
    own = _beside(decoder, choose, CUT_OUT)
    return replace(own, length=choose("length", (9, 11, 12, 13, 14, 15, 19, 37)))


def _few(decoder: Decoder, choose: Choices) -> Decoder:
    """Often of any length, and with lengths that leave few rows for the last chunk."""
    draw_lengths = _of_any_length if choose.chance("lengths", 0.3) else _beside
    return draw_lengths(decoder, choose, FEW)


def _recomputed(decoder: Decoder, choose: Choices) -> Decoder:
    """Checkpoints of the program's own, which Dynamo marks in the graph."""
    return replace(_small(_beside(decoder, choose, RECOMPUTED)), compiled=True)


def _split(decoder: Decoder, choose: Choices) -> Decoder:
    """Compiled in two parts, split at any place; or several calls and heads in one graph."""
    own = replace(decoder, extra="none", bend="none", calls="one", bodies="eager", precision="float64", compiled=True)
    if choose.chance("several heads", 0.5):
        return _beside(own, choose, SEVERAL_HEADS)
    return replace(own, calls=f"split {choose('place', range(1000))}", dynamic=False)


def _sinks(decoder: Decoder, choose: Choices) -> Decoder:
    own, mask = drawn(Layer, choose, "sinks", "bent"), choose("mask", ("arange", "strict", "padding", "window", "arithmetic"))
    return _first(
        decoder, core=choose("core", ("matmul", "einsum")), mask=mask, hiding=choose("hiding", ("fill", "where", "add")), **own
    )


KINDS: dict[str, Callable[[Decoder, Choices], Decoder]] = {
    "1": _arguments,
    "2": _wraps,
    "3": _ordinary,
    "4": _passes,
    "5": _threads,
    "6": _changes,
    "8": _linear,
    "9": _casts,
    "bytes": _bytes,
    "10": _sinks,
    "11": _operands,
    "12": _lengths,
    "places": partial(_beside, extras=terms.PLACES),
    "ends": partial(_of_any_length, extras=terms.ENDS),
    "pairs": partial(_beside, extras=terms.PAIRS),
    "looked up": partial(_beside, extras=terms.LOOKED_UP),
    "picked": partial(_beside, extras=PICKED),
    "over keys": partial(_beside, extras=terms.OVER_KEYS),
    "shifted": partial(_beside, extras=terms.SHIFTED),
    "joined": partial(_beside, extras=terms.JOINED),
    "tables": partial(_beside, extras=TABLES),
    "orders": partial(_beside, extras=ORDERS),
    "loops": partial(_beside, extras=LOOPS),
    "squares": _square,
    "compressed": partial(_beside, extras=COMPRESSED),
    "apart": partial(_beside, extras=terms.APART),
    "features": _features,
    "asserted": partial(_beside, extras=terms.ASSERTED),
    "numbers": partial(_of_any_length, extras=terms.NUMBERS),
    "few": _few,
    "views": _views,
    "halves": partial(_beside, extras=terms.HALVES),
    "stages": _stages,
    "whole": _whole,
    "scans": _scans,
    "associative": partial(_scans, mixers=tuple(TREES)),
    "states": partial(_scans, mixers=tuple(STATEFUL)),
    "decays": partial(_scans, mixers=DECAYS),
    "buffers": partial(_beside, extras=BUFFERS),
    "alone": _alone,
    "cut out": _cut_out,
    "known early": partial(_beside, extras=KNOWN_EARLY),
    "recomputed": _recomputed,
    "split": _split,
}
OFTEN = ("1", "2", "3", "8", "9", "10", "11", "places", "pairs", "apart", "features", "few")  # three times as often


def numbered(number: int, kinds: tuple[str, ...] = (), is_compiled: bool = False) -> Decoder:
    """A decoder by its number, of one of `kinds` if there are any; else of any kind, or of none in particular.

    Compiled ones have dynamic shapes and lazy outputs often.
    """
    choose = Choices(f"{number}")
    decoder = draw(choose)
    if kinds or choose.chance("of a kind", 0.6):
        turns = [(kind, turn) for kind in kinds or KINDS for turn in range(3 if kind in OFTEN and not kinds else 1)]
        kind, _ = choose("kind", turns)
        decoder = sensible(KINDS[kind](decoder, choose.within(kind)))
    if not is_compiled:
        return decoder
    dynamic, lazy = (choose.chance(f"compiled {name}", 0.4) for name in ("dynamic", "lazy"))
    return sensible(replace(decoder, compiled=True, dynamic=dynamic, lazy=lazy))
