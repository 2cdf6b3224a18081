"""Decoders drawn to hurt: for each kind of fault that was found once, the choices that lead there, drawn freely."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from tests.random_decoders.blocks import SCANS, STATEFUL, TREES, WHOLE
from tests.random_decoders.buffers import BUFFERS
from tests.random_decoders.compressed import COMPRESSED
from tests.random_decoders.cut_out import CUT_OUT
from tests.random_decoders.decays import DECAYS
from tests.random_decoders.extras import (
    APART,
    ASSERTED,
    BYTES,
    ENDS,
    EXTRAS,
    FEATURES,
    FEW,
    HALVES,
    JOINED,
    LOOKED_UP,
    NUMBERS,
    OVER_KEYS,
    PAIRS,
    PLACES,
    SHIFTED,
)
from tests.random_decoders.hidden import FILLS
from tests.random_decoders.known_early import KNOWN_EARLY
from tests.random_decoders.loops import LOOPS
from tests.random_decoders.mixed import MIXES
from tests.random_decoders.orders import ORDERS
from tests.random_decoders.recomputed import RECOMPUTED
from tests.random_decoders.several_heads import SEVERAL_HEADS
from tests.random_decoders.specification import CALLS, OUTSIDE, Decoder, Layer, draw, drawn, sensible
from tests.random_decoders.squares import SQUARES
from tests.random_decoders.tables import TABLES

SCORES = ("matmul", "einsum", "biased")


def _first(decoder: Decoder, **choices: Any) -> Decoder:
    return replace(decoder, layers=(replace(decoder.layers[0], **choices), *decoder.layers[1:]), precision="float64")


def _small(decoder: Decoder) -> Decoder:
    """Compiled ones take longest: one layer, nothing that is only slow."""
    return replace(decoder, layers=(replace(decoder.layers[0], mixer="none"),), bodies="eager")


def _arithmetic(decoder: Decoder, random: Random, *names: str) -> Decoder:
    own = drawn(Layer, random, *names)
    core = random.choice(("boolean", *SCORES))
    return _first(decoder, mask="arithmetic", core=core, hiding=random.choice(("fill", "where", *FILLS)), bent="none", **own)


def _arguments(decoder: Decoder, random: Random) -> Decoder:
    return _arithmetic(decoder, random, "apart", "relation", "together")


def _wraps(decoder: Decoder, random: Random) -> Decoder:
    return _arithmetic(decoder, random, "positions", "apart", "relation", "together")


def _ordinary(decoder: Decoder, random: Random) -> Decoder:
    own = drawn(Layer, random, "bent", "table", "bent_last")
    mask = random.choice(("arange", "tril", "triu", "window", "padding", "buffer", "packed"))
    return _first(decoder, core=random.choice(SCORES), mask=mask, hiding=random.choice(tuple(FILLS)), sinks="none", **own)


def _passes(decoder: Decoder, random: Random) -> Decoder:
    return replace(_small(decoder), outputs="logits", loss=random.choice(OUTSIDE), precision="float64", extra="none", bend="none")


def _threads(decoder: Decoder, random: Random) -> Decoder:
    return _called(decoder, "threads")


def _changes(decoder: Decoder, random: Random) -> Decoder:
    return _called(decoder, random.choice([way for way in CALLS if way.startswith(("buffer", "late"))]))


def _lengths(decoder: Decoder, random: Random) -> Decoder:
    return _called(decoder, random.choice(("lengths", "configured")))


def _called(decoder: Decoder, way: str) -> Decoder:
    return replace(_small(decoder), calls=way, extra="none", bend="none", dynamic=False)


def _stages(decoder: Decoder, random: Random) -> Decoder:
    """Two layers, so that there is a stretch between; weights that are used twice, and inputs that join between."""
    own = _features(decoder, random)
    if random.random() < 0.5:
        own = replace(own, features="none", embedding=random.choice(("tokens", "tied", "positions", "two tables")))
    way = random.choice([way for way in CALLS if way.startswith("stages")])
    return replace(_called(own, way), layers=own.layers, keep_every=random.choice((1, 2, 3)))


def _linear(decoder: Decoder, random: Random) -> Decoder:
    return replace(decoder, scale=random.choice((5, 0.3)), extra="none", **drawn(Decoder, random, "bend", "bend_at"))


def _casts(decoder: Decoder, random: Random) -> Decoder:
    if random.random() < 0.5:
        return replace(decoder, bend="none", **drawn(Decoder, random, "extra"))
    own = drawn(Layer, random, "counts") if random.random() < 0.7 else drawn(Layer, random, "keys_of_experts")
    return replace(_first(decoder, mlp="sorted experts", **own), batch=random.choice((3, 5)), length=random.choice((13, 19, 37)))


def _bytes(decoder: Decoder, random: Random) -> Decoder:
    """As many experts as a byte has numbers, sorted by these."""
    layer = replace(decoder.layers[0], mlp="sorted experts", counts="plain", keys_of_experts=random.choice(list(BYTES)))
    return replace(_small(decoder), layers=(layer,), length=random.choice((13, 19, 37)), extra="none", bend="none")


def _operands(decoder: Decoder, random: Random) -> Decoder:
    names = [name for name in EXTRAS if name.startswith(("odd", "signs", "heads", "shifted"))]
    return replace(decoder, bend="none", extra=random.choice(names))


def _beside(decoder: Decoder, random: Random, extras: Collection[str]) -> Decoder:
    return replace(decoder, bend="none", extra=random.choice(list(extras)))


def _features(decoder: Decoder, random: Random) -> Decoder:
    """An input joins the stream between two layers: its gradient is part of what the one leaves and the other takes."""
    first, features = replace(decoder.layers[0], mixer="none"), random.choice(list(FEATURES))
    second = drawn(Layer, random, "core", "mlp")
    layers = (first, replace(first, **second))
    return replace(decoder, layers=layers, embedding="given", features=features, calls="one", extra="none", bend="none")


def _whole(decoder: Decoder, random: Random) -> Decoder:
    """Several layers have something that runs whole: the backward half makes it again, a layer at a time."""
    layers = [
        replace(decoder.layers[0], mixer=random.choice((*WHOLE, "none")), **drawn(Layer, random, "core", "mlp", "wiring", "mask"))
        for _ in range(random.choice((2, 3)))
    ]
    lengths = {"calls": "lengths", "dynamic": True} if random.random() < 0.2 else {"calls": "one"}
    return replace(decoder, layers=tuple(layers), extra="none", bend="none", bodies="eager", precision="float64", **lengths)


def _scans(decoder: Decoder, random: Random, mixers: Collection[str] = tuple(SCANS)) -> Decoder:
    """A loop over rows that is one operator, whose steps are functions, or hands on a state; often of any length."""
    layers = [
        replace(decoder.layers[0], mixer=random.choice(list(mixers)), **drawn(Layer, random, "core", "mlp", "wiring"))
        for _ in range(random.choice((1, 2)))
    ]
    lengths: dict[str, Any] = {"calls": "one", "length": max(decoder.length, 3)}  # eager scans no rows either
    if random.random() < 0.3:
        lengths = {"calls": "lengths", "dynamic": True, "length": random.choice((5, 7, 11))}
    own: dict[str, Any] = {
        "extra": "none",
        "bend": "none",
        "bodies": "eager",
        "precision": "float64",
        "compiled": True,
        **lengths,
    }
    return replace(decoder, layers=tuple(layers), adjoints=random.choice(("exact", "all")), **own)


def _of_any_length(decoder: Decoder, random: Random, extras: Collection[str]) -> Decoder:
    own = _beside(replace(_small(decoder), calls="lengths", dynamic=True), random, extras)
    return replace(own, length=random.choice((5, 6, 7, 11, 19)), bodies=random.choice(("eager", "inductor")))


def _views(decoder: Decoder, random: Random) -> Decoder:
    """Views of what is returned are returned, too: of any length they begin where sizes say."""
    own = replace(_small(decoder), calls="lengths", dynamic=True, outputs="views", layout="batch first", loss="mean")
    return replace(own, length=random.choice((5, 11, 19)), bodies="eager")


def _square(decoder: Decoder, random: Random) -> Decoder:
    """Rows of a few widths: as many as make whole blocks, or a row more or less."""
    heads, head_size = random.choice(((1, 2), (2, 2), (1, 4), (2, 4)))
    length = random.choice((2, 3, heads * head_size)) * heads * head_size + random.choice((0, 0, 0, 1, -1))
    own = _beside(replace(decoder, heads=heads, head_size=head_size), random, SQUARES)
    return replace(own, length=min(length, 37))


def _alone(decoder: Decoder, random: Random) -> Decoder:
    """Logits much wider than what they are made of, behind what mixes rows, or does not; rows of them are read alone."""
    places = ["none"] * 3
    for place in random.sample(range(3), random.choice((1, 1, 2))):
        places[place] = random.choice(list(MIXES))
    own = replace(_called(decoder, "rows"), mixed=(places[0], places[1], places[2]), outputs="logits", loss="mean")
    sizes: dict[str, Any] = {"heads": 1, "head_size": 2, "vocabulary": random.choice((5, 8, 11, 13))}
    return replace(own, length=random.choice((2, 3, 5, 8, 11, 13)), batch=random.choice((1, 2, 3, 5)), scale=1, **sizes)


def _cut_out(decoder: Decoder, random: Random) -> Decoder:
    """Lengths of three blocks at least."""
    own = _beside(decoder, random, CUT_OUT)
    return replace(own, length=random.choice((9, 11, 12, 13, 14, 15, 19, 37)))


def _few(decoder: Decoder, random: Random) -> Decoder:
    """Often of any length, and with lengths that leave few rows for the last chunk."""
    draw_lengths = _of_any_length if random.random() < 0.3 else _beside
    return draw_lengths(decoder, random, FEW)


def _recomputed(decoder: Decoder, random: Random) -> Decoder:
    """Checkpoints of the program's own, which Dynamo marks in the graph."""
    return replace(_small(_beside(decoder, random, RECOMPUTED)), compiled=True)


def _split(decoder: Decoder, random: Random) -> Decoder:
    """Compiled in two parts, split at any place; or several calls and heads in one graph."""
    own = replace(decoder, extra="none", bend="none", calls="one", bodies="eager", precision="float64", compiled=True)
    if random.random() < 0.5:
        return _beside(own, random, SEVERAL_HEADS)
    return replace(own, calls=f"split {random.randrange(1000)}", dynamic=False)


def _sinks(decoder: Decoder, random: Random) -> Decoder:
    own, mask = drawn(Layer, random, "sinks", "bent"), random.choice(("arange", "strict", "padding", "window", "arithmetic"))
    return _first(
        decoder, core=random.choice(("matmul", "einsum")), mask=mask, hiding=random.choice(("fill", "where", "add")), **own
    )


KINDS: dict[str, Callable[[Decoder, Random], Decoder]] = {
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
    "places": partial(_beside, extras=PLACES),
    "ends": partial(_of_any_length, extras=ENDS),
    "pairs": partial(_beside, extras=PAIRS),
    "looked up": partial(_beside, extras=LOOKED_UP),
    "over keys": partial(_beside, extras=OVER_KEYS),
    "shifted": partial(_beside, extras=SHIFTED),
    "joined": partial(_beside, extras=JOINED),
    "tables": partial(_beside, extras=TABLES),
    "orders": partial(_beside, extras=ORDERS),
    "loops": partial(_beside, extras=LOOPS),
    "squares": _square,
    "compressed": partial(_beside, extras=COMPRESSED),
    "apart": partial(_beside, extras=APART),
    "features": _features,
    "asserted": partial(_beside, extras=ASSERTED),
    "numbers": partial(_of_any_length, extras=NUMBERS),
    "few": _few,
    "views": _views,
    "halves": partial(_beside, extras=HALVES),
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
OFTEN = (
    *("1", "2", "3", "8", "9", "10", "11", "places", "pairs", "apart", "features", "few") * 3,
    "4",
    "5",
    "6",
    "12",
    "ends",
    "numbers",
    "asserted",
    "bytes",
    "halves",
    "looked up",
    "over keys",
    "shifted",
    "joined",
    "tables",
    "orders",
    "loops",
    "squares",
    "compressed",
    "views",
    "stages",
    "whole",
    "scans",
    "associative",
    "states",
    "decays",
    "buffers",
    "alone",
    "cut out",
    "known early",
    "recomputed",
    "split",
)


def draw_kind(random: Random, kinds: tuple[str, ...] = ()) -> Decoder:
    """A decoder, of one of `kinds` if there are any; else of any kind, or of none in particular."""
    decoder = draw(random)
    if kinds:
        return sensible(KINDS[random.choice(kinds)](decoder, random))
    return sensible(KINDS[random.choice(OFTEN)](decoder, random)) if random.random() < 0.6 else decoder
