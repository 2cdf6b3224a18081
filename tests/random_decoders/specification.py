"""Choices of random decoders, each from a tuple of values; the first value is the simplest, and stays the first.

    draw(Choices("3"))  ->  Decoder(layers=(Layer(core="matmul", mask="window"),), length=5, ...)

Shrinking moves choices towards the front of their tuples while the failure stays the same. The text of a decoder has the fields
that are not the simplest: found.txt keeps these texts.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tests.random_decoders.choices import Choices
from tests.random_decoders.gradients import BENDS
from tests.random_decoders.masks import APART, BENT, FILLS, POSITIONS, RELATIONS, SINKS, TABLES, TOGETHER
from tests.random_decoders.mixers import ASSOCIATIVE, BYTES, COUNTS, DECAYS, FEATURES, KEYS, MIXES, SCANS, STATEFUL, UNCHUNKED
from tests.random_decoders.terms import EXTRAS, LINES
from tests.support.tables import listed_cases


def choice(*values: Any, rare: bool = False, also: Iterable[Any] = ()) -> Any:
    """A field with one of `values`; a rare one mostly has the first, simplest value; kinds may set one of `also`."""
    return field(default=values[0], metadata={"values": values, "rare": rare, "known": (*values, *also)})


INEXACT = ("float8", "rounded", "integers", "integer sums", "float16")  # rounding of one ulp may decide these gradients: no scale
OUTSIDE = ("largest", "filtered", "best", "margin")  # losses that compare logits with functions of them
CALLS = (  # see calls.py
    *("threads", "lengths", "configured"),
    *(f"buffer {way}" for way in ("written", "data written", "data", "numpy", "new")),
    *(f"late {way}" for way in ("optimizer", "fused", "data written", "data", "numpy", "in place")),
    *(f"stages {way}" for way in ("optimizer", "added")),
)


class Chosen:
    """Base of classes of choices: unknown values raise, and the text omits the simplest values."""

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            if item.metadata and value not in item.metadata["known"]:
                raise ValueError(f"{type(self).__name__} has no {item.name}={value!r}")

    def __repr__(self) -> str:
        values = ((item, getattr(self, item.name)) for item in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{item.name}={value!r}' for item, value in values if value != item.default)})"


@dataclass(frozen=True, repr=False)
class Layer(Chosen):
    """One block: a mixer, attention, an MLP, and how they are wired."""

    core: str = choice(
        "causal", "boolean", "biased", "matmul", "einsum", "differential", "retention", "linear", "sigmoid", "none"
    )
    mask: str = choice(
        *("arange", "tril", "triu", "buffer", "window", "chunked", "prefix", "strided", "padding", "packed", "band"),
        *("future", "none", "strict", "arithmetic"),
    )
    positions: str = choice(*POSITIONS)
    apart: str = choice(*APART)
    relation: str = choice(*RELATIONS)
    together: str = choice(*TOGETHER)
    hiding: str = choice("fill", "where", "add", "renormalise", *FILLS)
    bent: str = choice(*BENT, rare=True)
    table: str = choice(*TABLES)
    bent_last: bool = choice(False, True, rare=True)
    bias: str = choice("none", "alibi", "relative", "softcap", rare=True)
    sinks: str = choice(*SINKS, rare=True)
    keys: str = choice("own", "shared", "value residual", rare=True)
    groups: str = choice("none", "expand", "repeat", "enable", rare=True)
    projection: str = choice("separate", "fused", "low rank", "biased", rare=True)
    wide_values: bool = choice(False, True, rare=True)
    query_norm: bool = choice(False, True, rare=True)
    rotary: str = choice("none", "half", "interleaved", "partial", "complex")
    mixer: str = choice(
        *("none", "shift", "convolution", "cumulative sum", "cumulative mean", "recurrence"),
        rare=True,
        also=(*UNCHUNKED, *SCANS, *ASSOCIATIVE, *STATEFUL, *DECAYS),
    )
    norm: str = choice("spelled", "layer", "rms", "none")
    wiring: str = choice("pre", "post", "sandwich", "parallel", "scaled", "streams", "gated", "mixed streams")
    mlp: str = choice("none", "plain", "gated", "fused", "squared", "experts", "top experts", "sorted experts")
    counts: str = choice(*COUNTS, rare=True)
    keys_of_experts: str = choice(*KEYS, rare=True, also=BYTES)

    @property
    def is_fused(self) -> bool:
        """Whether attention is one operator."""
        return self.core in ("causal", "boolean", "biased")


@dataclass(frozen=True, repr=False)
class Decoder(Chosen):
    """A model, its inputs and its options. Sizes are small, so that they often coincide."""

    layers: tuple[Layer, ...] = (Layer(),)
    layout: str = choice("batch first", "time first", "unbatched", "folded")
    length: int = choice(4, 1, 2, 3, 5, 6, 7, 8, 11, 13, 19, 37, also=range(1, 38))
    batch: int = choice(2, 1, 3, 4, 5)
    heads: int = choice(1, 2, 4)
    head_size: int = choice(2, 4)
    vocabulary: int = choice(5, 4, 8, 11, 13)
    embedding: str = choice("tokens", "tied", "positions", "given", "two tables")
    skips: bool = choice(False, True, rare=True)
    final_norm: bool = choice(False, True)
    capped: bool = choice(False, True, rare=True)
    loss: str = choice(
        *("mean", "sum", "none", "ignored", "smoothed", "shifted", "shifted labels", "weighted", "z", "entropy", "divergence"),
        *("squares", "last", "sequences", "preferences", "largest", "filtered", "best", "margin"),
    )
    outputs: str = choice("loss", "loss beside logits", "loss and logits", "logits", "hidden", rare=True, also=("views",))
    chunk_size: int = choice(3, 1, 2, 4, 5, 7, 100)
    loss_chunk_size: int = choice(3, 1, 2, 4, 5, 7, 100)
    also: int = choice(2, 1, 3, 4, 5, 6)
    save: str = choice("inputs", "attention", "projections", "products", "auto")
    keep_every: int = choice(1, 2, 3, rare=True)
    offload: str = choice("none", "inputs", "attention", rare=True)
    bodies: str = choice("eager", "inductor")
    accumulate: str = choice("float32", "same")
    compiled: bool = choice(False, True, rare=True)
    lazy: bool = choice(False, True, rare=True)
    dynamic: bool = choice(False, True, rare=True)
    precision: str = choice("float64", "float32", "bfloat16 autocast", rare=True)
    frozen: str = choice("nothing", "head")
    sums: str = choice("plain", "masked", "selected", "normalized")
    scale: float = choice(1, 5, 0.3)
    bend: str = choice(*BENDS, rare=True)
    bend_at: str = choice("logits", "x")
    extra: str = choice(*EXTRAS, rare=True, also=LINES)
    calls: str = choice("one", *CALLS, rare=True, also=("rows", *(f"split {place}" for place in range(1000))))
    features: str = choice("none", also=FEATURES)
    mixed_before_norm: str = choice("none", also=MIXES)  # the last norm
    mixed_after_norm: str = choice("none", also=MIXES)
    mixed_logits: str = choice("none", also=MIXES)
    adjoints: str = choice("exact", also=("all",))  # "all": truncated to as many chunks as there are
    seed: int = 0

    @property
    def width(self) -> int:
        return self.heads * self.head_size


# -- drawing


def draw(choose: Choices) -> Decoder:
    """A decoder of one or two layers."""
    count = 1 + choose.chance("two layers", 1 / 3)
    layers = tuple(Layer(**drawn(Layer, choose.within(f"layer {number}"))) for number in range(count))
    return sensible(Decoder(layers=layers, seed=choose("seed", range(1000)), **drawn(Decoder, choose)))


def drawn(kind: type, choose: Choices, *names: str) -> dict[str, Any]:
    """Values for all choices, or for the named ones, which are then not rare."""
    wanted = {item.name: item.metadata for item in fields(kind) if item.metadata and (not names or item.name in names)}
    simplest = {name for name, own in wanted.items() if own["rare"] and not names and choose.chance(f"{name} is rare", 0.75)}
    return {name: own["values"][0] if name in simplest else choose(name, own["values"]) for name, own in wanted.items()}


Rule = tuple[Callable[[Any], bool], dict[str, Any]]


def _following(item: Any, rules: Iterable[Rule]) -> Any:
    """The item with the choices of each rule that holds, in their order."""
    for holds, choices in rules:
        item = replace(item, **choices) if holds(item) else item
    return item


# parts outside of layers: ways of calling, bent gradients, terms added to the loss
OUTSIDE_OF_LAYERS: tuple[Rule, ...] = tuple(listed_cases("outside of layers", globals()))
WHOLE_MODEL: tuple[Rule, ...] = tuple(listed_cases("the whole model", globals()))
UNFUSED = ("matmul", "einsum", "differential")
WITHOUT = {"keys": "own", "groups": "none", "projection": "separate", "wide_values": False, "query_norm": False, "rotary": "none"}
PLAIN = {"positions": "plain", "apart": "less", "relation": "<= 0", "together": "or itself"}
EACH_LAYER: tuple[Rule, ...] = tuple(listed_cases("each layer", globals()))


def sensible(decoder: Decoder) -> Decoder:
    """The decoder with choices without effect set to the simplest: equal programs are equal decoders."""
    decoder = _following(decoder, OUTSIDE_OF_LAYERS)
    if decoder.calls.startswith("buffer"):
        first = replace(decoder.layers[0], mask="buffer", core="matmul", hiding="fill", bent="none", sinks="none")
        decoder = replace(decoder, layers=(first, *decoder.layers[1:]))
    decoder = _following(decoder, WHOLE_MODEL)
    layers: list[Layer] = []
    for layer in decoder.layers:
        layers.append(_sensible(layer, layers[0] if layers else None, decoder))
    return replace(decoder, layers=tuple(layers))


def _sensible(layer: Layer, first: Layer | None, decoder: Decoder) -> Layer:
    by_decoder: tuple[Rule, ...] = (
        (lambda one: decoder.precision != "float64", {"bent": "none", "rotary": "none"}),
        (lambda one: decoder.precision != "float64" and one.hiding in FILLS, {"hiding": "fill"}),
        (lambda one: decoder.heads == 1 or (one.groups == "enable" and decoder.layout == "folded"), {"groups": "none"}),
    )
    layer = _following(layer, (*by_decoder, *EACH_LAYER))
    is_another = first is None or (first.groups, first.wide_values) != (layer.groups, layer.wide_values)
    return replace(layer, keys="own") if is_another or (first is not None and first.core == "none") else layer


# -- shrinking


def simpler(decoder: Decoder) -> Iterator[Decoder]:
    """Decoders with one simpler choice."""
    if len(decoder.layers) > 1:
        yield from (sensible(replace(decoder, layers=(layer,))) for layer in decoder.layers)
    for number, layer in enumerate(decoder.layers):
        for other in _simpler_fields(layer):
            yield sensible(replace(decoder, layers=(*decoder.layers[:number], other, *decoder.layers[number + 1 :])))
    yield from map(sensible, _simpler_fields(decoder))


def _simpler_fields(item: Any) -> Iterator[Any]:
    for own in fields(item):
        values = own.metadata.get("values", ())
        value = getattr(item, own.name)
        for other in values[: values.index(value) if value in values else 1]:  # kinds set other values
            yield replace(item, **{own.name: other})


def shrunk(decoder: Decoder, fails: Callable[[Decoder], bool], tries: int = 200) -> Decoder:
    """The simplest decoder found that still fails.

    Hypothesis, with a choice per field, runs 300 to 450 programs where this runs 100 to 180, and cannot start from a decoder.
    """
    seen = {decoder}
    progress = True
    while progress:
        progress = False
        for other in simpler(decoder):
            if other in seen:
                continue
            seen.add(other)
            if len(seen) > tries:
                return decoder
            if fails(other):
                decoder, progress = other, True
                break
    return decoder
