"""Kinds of random decoders: for each kind of fault that was found once, the choices that lead there, drawn freely."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

from tests.random_decoders.choices import Choices
from tests.random_decoders.masks import FILLS
from tests.random_decoders.mixers import ASSOCIATIVE, BYTES, DECAYS, FEATURES, MIXES, SCANS, STATEFUL, UNCHUNKED
from tests.random_decoders.specification import CALLS, OUTSIDE, Decoder, Layer, draw, drawn, sensible
from tests.random_decoders.terms import EXTRAS, TERMS

SCORES = ("matmul", "einsum", "biased")
# no other sources of errors
ALONE: dict[str, Any] = {"extra": "none", "bend": "none", "bodies": "eager", "precision": "float64"}
PLACES_OF_MIXES = ("mixed_before_norm", "mixed_after_norm", "mixed_logits")


def _first(decoder: Decoder, **choices: Any) -> Decoder:
    return replace(decoder, layers=(replace(decoder.layers[0], **choices), *decoder.layers[1:]), precision="float64")


def _layers(choose: Choices, count: int) -> list[Choices]:
    return [choose.within(f"layer {number}") for number in range(count)]


def _small(decoder: Decoder) -> Decoder:
    """One layer and no slow options: compilation takes longest."""
    return replace(decoder, layers=(replace(decoder.layers[0], mixer="none"),), bodies="eager")


def _arithmetic(decoder: Decoder, choose: Choices, names: tuple[str, ...]) -> Decoder:
    """Masks by index arithmetic."""
    own = drawn(Layer, choose, *names)
    core = choose("core", ("boolean", *SCORES))
    return _first(decoder, mask="arithmetic", core=core, hiding=choose("hiding", ("fill", "where", *FILLS)), bent="none", **own)


def _ordinary(decoder: Decoder, choose: Choices) -> Decoder:
    own = drawn(Layer, choose, "bent", "table", "bent_last")
    mask = choose("mask", ("arange", "tril", "triu", "window", "padding", "buffer", "packed"))
    return _first(decoder, core=choose("core", SCORES), mask=mask, hiding=choose("hiding", FILLS), sinks="none", **own)


def _passes(decoder: Decoder, choose: Choices) -> Decoder:
    return replace(_small(decoder), outputs="logits", loss=choose("loss", OUTSIDE), **ALONE)


def _calls(decoder: Decoder, choose: Choices, ways: Collection[str]) -> Decoder:
    return _called(decoder, choose("calls", ways))


def _ways(*prefixes: str) -> list[str]:
    return [way for way in CALLS if way.startswith(prefixes)]


def _called(decoder: Decoder, way: str) -> Decoder:
    return replace(_small(decoder), calls=way, extra="none", bend="none", dynamic=False)


def _stages(decoder: Decoder, choose: Choices) -> Decoder:
    """Two layers, so that there is a segment between them; weights that are used twice, and inputs that join between them."""
    own = _features(decoder, choose)
    if choose.chance("no features", 0.5):
        own = replace(own, features="none", embedding=choose("embedding", ("tokens", "tied", "positions", "two tables")))
    return replace(_calls(own, choose, _ways("stages")), layers=own.layers, keep_every=choose("keep_every", (1, 2, 3)))


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
    """As many experts as a byte has values; rows are sorted by bytes."""
    layer = replace(decoder.layers[0], mlp="sorted experts", counts="plain", keys_of_experts=choose("keys_of_experts", BYTES))
    return replace(_small(decoder), layers=(layer,), length=choose("length", (13, 19, 37)), extra="none", bend="none")


def _with_term(decoder: Decoder, choose: Choices, terms: Collection[str]) -> Decoder:
    return replace(decoder, bend="none", extra=choose("extra", terms))


def _features(decoder: Decoder, choose: Choices) -> Decoder:
    """An input is added between two layers: its gradient is part of the gradient between them."""
    first, features = replace(decoder.layers[0], mixer="none"), choose("features", FEATURES)
    second = drawn(Layer, choose.within("layer 1"), "core", "mlp")
    layers = (first, replace(first, **second))
    return replace(decoder, layers=layers, embedding="given", features=features, calls="one", extra="none", bend="none")


def _unchunked(decoder: Decoder, choose: Choices) -> Decoder:
    """Several layers have a mixer that is not chunked: the backward graph recomputes it, a layer at a time."""
    layers = [
        replace(decoder.layers[0], mixer=own("mixer", (*UNCHUNKED, "none")), **drawn(Layer, own, "core", "mlp", "wiring", "mask"))
        for own in _layers(choose, choose("count", (2, 3)))
    ]
    lengths = {"calls": "lengths", "dynamic": True} if choose.chance("lengths", 0.2) else {"calls": "one"}
    return replace(decoder, layers=tuple(layers), **lengths, **ALONE)


def _scans(decoder: Decoder, choose: Choices, mixers: Collection[str] = tuple(SCANS)) -> Decoder:
    """A loop over rows that is one operator: its steps are functions, or it returns a state. Lengths are often dynamic."""
    layers = [
        replace(decoder.layers[0], mixer=own("mixer", mixers), **drawn(Layer, own, "core", "mlp", "wiring"))
        for own in _layers(choose, choose("count", (1, 2)))
    ]
    lengths: dict[str, Any] = {"calls": "one", "length": max(decoder.length, 3)}  # eager cannot scan zero rows either
    if choose.chance("lengths", 0.3):
        lengths = {"calls": "lengths", "dynamic": True, "length": choose("length", (5, 7, 11))}
    own = replace(decoder, layers=tuple(layers), adjoints=choose("adjoints", ("exact", "all")), compiled=True, **lengths)
    return replace(own, **ALONE)


def _of_any_length(decoder: Decoder, choose: Choices, terms: Collection[str]) -> Decoder:
    own = _with_term(replace(_small(decoder), calls="lengths", dynamic=True), choose, terms)
    return replace(own, length=choose("length", (5, 6, 7, 11, 19)), bodies=choose("bodies", ("eager", "inductor")))


def _views(decoder: Decoder, choose: Choices) -> Decoder:
    """Views of results are returned, too: with a dynamic length, sizes say where they begin."""
    own = replace(_small(decoder), calls="lengths", dynamic=True, outputs="views", layout="batch first", loss="mean")
    return replace(own, length=choose("length", (5, 11, 19)), bodies="eager")


def _square(decoder: Decoder, choose: Choices) -> Decoder:
    """As many rows as a few widths, or a row more or less."""
    width = decoder.width
    length = choose("blocks", (2, 3, width)) * width + (choose("rows more", (1, -1)) if choose.chance("not whole", 0.4) else 0)
    own = _with_term(decoder, choose, TERMS["squares"])
    return replace(own, length=min(length, 37))


def _single_rows(decoder: Decoder, choose: Choices) -> Decoder:
    """Logits much wider than the hidden states, after something that mixes rows, or does not; single rows of them are read."""
    first = choose("place", PLACES_OF_MIXES)
    second = choose("second place", PLACES_OF_MIXES) if choose.chance("two places", 0.5) else first
    mixes: dict[str, Any] = {name: choose(name, MIXES) for name in (first, second)}
    sizes: dict[str, Any] = {"heads": 1, "head_size": 2, "vocabulary": choose("vocabulary", (5, 8, 11, 13))}
    sizes |= {"length": choose("length", (2, 3, 5, 8, 11, 13)), "batch": choose("batch", (1, 2, 3, 5))}
    return replace(_called(decoder, "rows"), outputs="logits", loss="mean", scale=1, **mixes, **sizes)


def _cut_out(decoder: Decoder, choose: Choices) -> Decoder:
    """At least three blocks of rows."""
    own = _with_term(decoder, choose, TERMS["cut out"])
    return replace(own, length=choose("length", (9, 11, 12, 13, 14, 15, 19, 37)))


def _often_of_any_length(decoder: Decoder, choose: Choices, terms: Collection[str]) -> Decoder:
    """Often with a dynamic length, and with lengths that leave few rows for the last chunk."""
    draw_lengths = _of_any_length if choose.chance("lengths", 0.3) else _with_term
    return draw_lengths(decoder, choose, terms)


def _recomputed(decoder: Decoder, choose: Choices) -> Decoder:
    """Checkpoints in the program, which Dynamo marks in the graph."""
    return replace(_small(_with_term(decoder, choose, TERMS["recomputed"])), compiled=True)


def _split(decoder: Decoder, choose: Choices) -> Decoder:
    """Compiled in two parts, split at any place; or several calls and heads in one graph."""
    own = replace(decoder, calls="one", compiled=True, **ALONE)
    if choose.chance("several heads", 0.5):
        return _with_term(own, choose, TERMS["several heads"])
    return replace(own, calls=f"split {choose('place', range(1000))}", dynamic=False)


def _sinks(decoder: Decoder, choose: Choices) -> Decoder:
    own, mask = drawn(Layer, choose, "sinks", "bent"), choose("mask", ("arange", "strict", "padding", "window", "arithmetic"))
    return _first(
        decoder, core=choose("core", ("matmul", "einsum")), mask=mask, hiding=choose("hiding", ("fill", "where", "add")), **own
    )


# kinds that only add a term of the table with their name
TERMS_ALONE = (
    *("places", "pairs", "looked up", "over keys", "shifted", "joined", "tables", "orders", "loops", "compressed"),
    *("apart", "asserted", "halves", "buffers", "known early"),
)
OPERANDS = [name for name in EXTRAS if name.startswith(("odd", "signs", "heads", "shifted"))]
KINDS: dict[str, Callable[[Decoder, Choices], Decoder]] = {
    "1": partial(_arithmetic, names=("apart", "relation", "together")),
    "2": partial(_arithmetic, names=("positions", "apart", "relation", "together")),
    "3": _ordinary,
    "4": _passes,
    "5": partial(_calls, ways=("threads",)),
    "6": partial(_calls, ways=_ways("buffer", "late")),
    "8": _linear,
    "9": _casts,
    "bytes": _bytes,
    "10": _sinks,
    "11": partial(_with_term, terms=OPERANDS),
    "12": partial(_calls, ways=("lengths", "configured")),
    **{kind: partial(_with_term, terms=TERMS[kind]) for kind in TERMS_ALONE},
    "ends": partial(_of_any_length, terms=TERMS["ends"]),
    "numbers": partial(_of_any_length, terms=TERMS["numbers"]),
    "squares": _square,
    "features": _features,
    "few": partial(_often_of_any_length, terms=TERMS["few"]),
    "picked": partial(_often_of_any_length, terms=TERMS["picked"]),
    "views": _views,
    "stages": _stages,
    "whole": _unchunked,
    "scans": _scans,
    "associative": partial(_scans, mixers=tuple(ASSOCIATIVE)),
    "states": partial(_scans, mixers=tuple(STATEFUL)),
    "decays": partial(_scans, mixers=DECAYS),
    "alone": _single_rows,
    "cut out": _cut_out,
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
