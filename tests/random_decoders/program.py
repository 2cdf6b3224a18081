"""A decoder as the text of a program that defines a model, inputs and options: paste it and run it."""

import re

from tests.random_decoders.blocks import block
from tests.random_decoders.gradients import FUNCTIONS, bend
from tests.random_decoders.mixers import FEATURES, MIXES, STATEFUL
from tests.random_decoders.specification import Decoder, shrunk
from tests.random_decoders.tables import TEMPLATES, expressions, tables
from tests.random_decoders.terms import LINES, PARAMETERS
from tests.random_decoders.writer import Layout, Writer

LOSSES = tables("losses.txt")
VIEWS = expressions(LOSSES["views"]).values()
TOLERANCES = {"float64": 1e-12, "float32": 1e-3, "bfloat16 autocast": 0.1}
OPERATORS = "from tests.support.stateful.{0} import {0}\n"
IMPORTED = {
    "grouped_mm": "from transformers.integrations import moe  # defines the grouped product\n",
    "checkpoint(": "from torch.utils.checkpoint import checkpoint\n",
    "partial(": "from functools import partial\n",
    "create_selective": "from torch.utils.checkpoint import create_selective_checkpoint_contexts\n",
}


def program(decoder: Decoder) -> str:
    """The text of the program."""
    w = Writer(decoder)
    _embed(w)
    for i, layer in enumerate(decoder.layers):
        block(w, layer, i)
        if i == 0 and decoder.features != "none":
            w.line("x = x + beside")
    result = _result(w)
    lines = _needed([*w.lines, f"return {result}"])
    own, is_double = "\n        ".join(dict.fromkeys(w.own)), decoder.precision == "float64"
    return TEMPLATES["program"].format(
        functions=_functions(decoder, lines),
        norm=TEMPLATES["norm"] if "Norm(" in own.replace("LayerNorm(", "").replace("RMSNorm(", "") else "",
        imports=_imports("\n".join(lines)),
        own=own or "pass",
        arguments=", ".join(w.inputs),
        lines="\n        ".join(_under_autocast(lines) if decoder.precision == "bfloat16 autocast" else lines),
        seed=decoder.seed,
        dtype="float64" if is_double else "float32",
        frozen=TEMPLATES["frozen"] if decoder.frozen == "head" else "",
        inputs=",\n    ".join(f'"{name}": {value}' for name, value in w.inputs.items()),
        options=_options(decoder),
        tolerance=TOLERANCES[decoder.precision],
        outside=_outside(decoder),
        reduce=_reduce(decoder),
        check=_check(decoder),
    )


def needed(decoder: Decoder) -> Decoder:
    """The decoder with the simplest choices that give the same program."""
    text = program(decoder)
    return shrunk(decoder, lambda other: program(other) == text, tries=10_000)


def _imports(text: str) -> str:
    used = [name for name in STATEFUL if f"{name}(" in text]
    known = "".join(lines for word, lines in IMPORTED.items() if word in text)
    return "".join(OPERATORS.format(name) for name in used) + known


def _functions(decoder: Decoder, lines: list[str]) -> str:
    """Functions that the lines call and that define their gradients."""
    called = {name: text for name, text in FUNCTIONS.items() if f"{name}.apply" in "\n".join(lines)}
    return "".join(called.values()) + bend(decoder.bend)


def _reduce(decoder: Decoder) -> str:
    """A function from results of the model to a scalar loss."""
    plain = {"loss beside logits": "(lambda results: results[0])", "logits": "outside"}.get(decoder.outputs, "scalar_of")
    return plain if decoder.scale == 1 else f"lambda results: {decoder.scale} * {plain}(results)"


def _check(decoder: Decoder) -> str:
    if decoder.calls != "one":
        return TEMPLATES["called"].format(way=decoder.calls, static=not decoder.dynamic)
    return TEMPLATES["compiled"].format(static=not decoder.dynamic) if decoder.compiled else TEMPLATES["direct"]


def _needed(lines: list[str]) -> list[str]:
    """The lines without assignments that no other line uses."""
    optional = {"at = ": {"at"}, "aux = 0.0": {"aux"}, "stream = None": {"stream"}, "first_k, ": {"first_k", "first_v"}}
    kept = []
    for number, line in enumerate(lines):
        names = next((names for start, names in optional.items() if line.startswith(start)), None)
        others = "\n".join([*lines[:number], *lines[number + 1 :]])
        if names is None or names & set(re.findall(r"\w+", others)):
            kept.append(line)
    return kept


def _under_autocast(lines: list[str]) -> list[str]:
    return ["with torch.autocast('cpu', torch.bfloat16):", *(f"    {line}" for line in lines)]


def _embed(w: Writer) -> None:
    """Inputs, sizes, and the first `x`."""
    d, v, decoder = w.decoder.width, w.decoder.vocabulary, w.decoder
    sizes = w.layout.sizes.replace("b", str(decoder.batch)).replace("t", str(decoder.length))
    if decoder.embedding == "given":
        kind = "float64" if decoder.precision == "float64" else "float32"
        w.inputs["embeds"] = f"torch.randn({sizes}, {d}, dtype=torch.{kind}, requires_grad=True)"
    else:
        w.inputs["ids"] = f"torch.randint({v}, ({sizes},))"
    w.inputs["labels"] = f"torch.randint({v}, ({sizes},))"
    w.line(*_sizes(w))
    w.line("at = torch.arange(t)", "aux = 0.0", "stream = None")
    w.line("x = embeds" if decoder.embedding == "given" else f"x = {w.embedding('embed', v, d)}(ids)")
    if decoder.features != "none":
        parts, expression = FEATURES[decoder.features]
        kind = "float64" if decoder.precision == "float64" else "float32"
        w.inputs["feats"] = f"torch.randn({sizes}, {d // parts}, dtype=torch.{kind}, requires_grad=True)"
        w.line(f"beside = {expression}")
    if decoder.embedding == "positions":
        extra = "[:, None]" if decoder.layout == "time first" else ""
        w.line(f"x = x + {w.embedding('position', 40, d)}(at){extra}")
    elif decoder.embedding == "two tables":
        w.line(f"x = x + 0.5 * {w.embedding('second', 3, d)}(ids % 3)")


def _sizes(w: Writer) -> list[str]:
    return ["t = labels.shape[0]" if w.decoder.layout == "unbatched" else f"{w.layout.sizes} = labels.shape"]


def _result(w: Writer) -> str:
    decoder = w.decoder
    if decoder.outputs == "hidden":
        return "x + stream" if any("stream = stream" in line for line in w.lines) else "x"
    if any("stream = stream" in line for line in w.lines):
        w.line("x = x + stream")
    _head(w)
    if decoder.outputs == "logits":
        return "logits"
    _loss(w)
    if any("aux + " in line for line in w.lines):
        w.line("loss = loss + 0.1 * aux")
    if decoder.extra != "none":
        lines = LINES[decoder.extra]
        w.line(*lines, "loss = loss + term")
        for name, rank in PARAMETERS.items():
            if f"self.{name}" in "".join(lines):
                w.parameter(name, *([decoder.width] * rank or [1]))
    if decoder.outputs == "views":
        return ", ".join(("loss", "x", *VIEWS))
    return "loss" if decoder.outputs == "loss" else "loss, logits"


def _outside(decoder: Decoder) -> str:
    """The loss of a decoder that returns its logits, as a function of them."""
    if decoder.outputs != "logits":
        return ""
    w = Writer(decoder)
    w.line("labels = inputs['labels']", *_sizes(w))
    _loss(w)
    lines = "\n".join(f"    {line}" for line in [*w.lines, "return loss"])
    return f"\n\ndef outside(logits):\n{lines}\n\n\n"


def _options(decoder: Decoder) -> str:
    options = {
        "chunk_size": decoder.chunk_size,
        "loss_chunk_size": decoder.loss_chunk_size,
        "also": tuple(dict.fromkeys((decoder.also, decoder.length))),
        "save": decoder.save,
        "keep_every": decoder.keep_every,
        "offload": decoder.offload,
        "bodies": decoder.bodies,
        "accumulate": decoder.accumulate,
        "outputs": "lazy" if decoder.lazy else "dense",
        **({"adjoints": _reach(decoder)} if decoder.adjoints == "all" else {}),
    }
    return repr(options)


def _reach(decoder: Decoder) -> int:
    """All rows but one if they are as many chunks as all rows; with dynamic lengths, more than all."""
    fewest = min(decoder.chunk_size, decoder.loss_chunk_size, decoder.also)
    return decoder.length - 1 if fewest > 1 and decoder.length > 1 and decoder.calls == "one" else 10_000


# -- the head and the loss


def _head(w: Writer) -> None:
    """Write `logits` from `x`."""
    d, v = w.decoder.width, w.decoder.vocabulary
    if w.decoder.mixed_before_norm != "none":
        w.line(_mixed(w.decoder.mixed_before_norm, w.layout, "x"))
    if w.decoder.final_norm:
        w.line(f"x = {w.norm('spelled', 'last_norm', d)}(x)")
    if w.decoder.mixed_after_norm != "none":
        w.line(_mixed(w.decoder.mixed_after_norm, w.layout, "x"))
    if w.decoder.bend != "none" and w.decoder.bend_at == "x":
        w.line("x = Bend.apply(x)")
    if w.decoder.embedding == "tied":
        w.line("logits = x @ self.embed.weight.t()")
    else:
        w.line(f"logits = {w.linear('head', d, v)}(x)")
    if w.decoder.capped:
        w.line("logits = 3 * torch.tanh(logits / 3)")
    if w.decoder.mixed_logits != "none":
        w.line(_mixed(w.decoder.mixed_logits, w.layout, "logits"))
    if w.decoder.bend != "none" and w.decoder.bend_at == "logits":
        w.line("logits = Bend.apply(logits)")


def _loss(w: Writer) -> None:
    """Write `loss` from `logits` and `labels`."""
    loss, width, vocabulary = w.decoder.loss, w.decoder.width, w.decoder.vocabulary
    lines = LOSSES["tokens"].get(loss) or (*LOSSES["sums"][w.decoder.sums], *LOSSES["sequences"][loss])
    other = w.linear("other_head", width, vocabulary) if loss == "divergence" else ""
    flat = f"logits.reshape(-1, {vocabulary}), labels.reshape(-1)"
    names = {"flat": flat, "v": vocabulary, "time": w.layout.time, "rows": ":, " * w.layout.time, "other": other}
    w.line(*(line.format(**names) for line in lines))


def _mixed(name: str, layout: Layout, value: str) -> str:
    """The line that mixes `value`."""
    over = {(0, True): "[:, None, None]", (0, False): "[:, None]"}.get((layout.time, "," in layout.sizes), "[:, None]")
    parts = {"over": over, "time": layout.time, "last": layout.cut("x", "-1:"), "first": layout.cut("x", ":1")}
    line = MIXES[name].format(**parts)
    return f"{value} = (lambda x: {line})({value})" if value != "x" else f"x = {line}"
