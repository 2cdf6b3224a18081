"""A decoder as the text of a program, which defines a model, its inputs and its options, and can be pasted and run."""

from __future__ import annotations

import re

from tests.random_decoders.blocks import block
from tests.random_decoders.extras import FEATURES, LINES, PARAMETERS
from tests.random_decoders.gradients import BEND, BENDS, FUNCTIONS, KNOWN
from tests.random_decoders.losses import head, loss
from tests.random_decoders.mixers import STATEFUL
from tests.random_decoders.specification import Decoder, shrunk
from tests.random_decoders.writer import Writer

TOLERANCES = {"float64": 1e-12, "float32": 1e-3, "bfloat16 autocast": 0.1}
PROGRAM = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from tests.support.scans import scan

from tests.support.exactness import scalar_of
{imports}{norm}{functions}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {own}

    def forward(self, {arguments}):
        {lines}


torch.manual_seed({seed})
model = Model().to(torch.{dtype}){frozen}
inputs = {{
    {inputs},
}}
options = {options}
{outside}tolerance, reduce = {tolerance}, {reduce}


def check():
{check}


if __name__ == "__main__":
    print(check().errors)
"""
COMPILED = """\
    from tests.support.exactness import compare

    with torch._dynamo.config.patch(assume_static_by_default={static}):
        return compare(model, inputs, **options, reduce=reduce, tolerance=tolerance, streams=None, graphs=None)"""
CALLED = """\
    from tests.random_decoders.calls import compare_called

    with torch._dynamo.config.patch(assume_static_by_default={static}):
        return compare_called("{way}", model, inputs, **options, reduce=reduce, tolerance=tolerance)"""
DIRECT = """\
    from tests.random_decoders.direct import compare_directly

    return compare_directly(model, inputs, **options, reduce=reduce, tolerance=tolerance)"""
FROZEN = """
for name, parameter in model.named_parameters():
    parameter.requires_grad_(not name.startswith(("head.", "last_norm.")))"""
OPERATORS = "from tests.support.stateful.{0} import {0}\n"
IMPORTED = {
    "grouped_mm": "from transformers.integrations import moe  # defines the grouped product\n",
    "checkpoint(": "from torch.utils.checkpoint import checkpoint\n",
    "partial(": "from functools import partial\n",
    "create_selective": "from torch.utils.checkpoint import create_selective_checkpoint_contexts\n",
}
NORM = """

class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight

"""


def program(decoder: Decoder) -> str:
    """The whole text."""
    w = Writer(decoder)
    _embed(w)
    for i, layer in enumerate(decoder.layers):
        block(w, layer, i)
        if i == 0 and decoder.features != "none":
            w.line("x = x + beside")
    result = _result(w)
    lines = _needed([*w.lines, f"return {result}"])
    own, is_double = "\n        ".join(dict.fromkeys(w.own)), decoder.precision == "float64"
    return PROGRAM.format(
        functions=_functions(decoder, lines),
        norm=NORM if "Norm(" in own.replace("LayerNorm(", "").replace("RMSNorm(", "") else "",
        imports=_imports("\n".join(lines)),
        own=own or "pass",
        arguments=", ".join(w.inputs),
        lines="\n        ".join(_under_autocast(lines) if decoder.precision == "bfloat16 autocast" else lines),
        seed=decoder.seed,
        dtype="float64" if is_double else "float32",
        frozen=FROZEN if decoder.frozen == "head" else "",
        inputs=",\n    ".join(f'"{name}": {value}' for name, value in w.inputs.items()),
        options=_options(decoder),
        tolerance=TOLERANCES[decoder.precision],
        outside=_outside(decoder),
        reduce=_reduce(decoder),
        check=_check(decoder),
    )


def needed(decoder: Decoder) -> Decoder:
    """The decoder with the simplest of all choices that its program does not depend on."""
    text = program(decoder)
    return shrunk(decoder, lambda other: program(other) == text, tries=10_000)


def _imports(text: str) -> str:
    used = [name for name in STATEFUL if f"{name}(" in text]
    known = "".join(lines for word, lines in IMPORTED.items() if word in text)
    return "".join(OPERATORS.format(name) for name in used) + known


def _functions(decoder: Decoder, lines: list[str]) -> str:
    """Functions with gradients of their own that the lines call."""
    called = {name: text for name, text in {**FUNCTIONS, **KNOWN}.items() if f"{name}.apply" in "\n".join(lines)}
    return "".join(called.values()) + (BEND.format(gradient=BENDS[decoder.bend]) if decoder.bend != "none" else "")


def _reduce(decoder: Decoder) -> str:
    """The number that is differentiated, of what the model returns."""
    plain = {"loss beside logits": "(lambda results: results[0])", "logits": "outside"}.get(decoder.outputs, "scalar_of")
    return plain if decoder.scale == 1 else f"lambda results: {decoder.scale} * {plain}(results)"


def _check(decoder: Decoder) -> str:
    if decoder.calls != "one":
        return CALLED.format(way=decoder.calls, static=not decoder.dynamic)
    return COMPILED.format(static=not decoder.dynamic) if decoder.compiled else DIRECT


def _needed(lines: list[str]) -> list[str]:
    """The lines without those that set up what the others never use."""
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
        parts, made = FEATURES[decoder.features]
        kind = "float64" if decoder.precision == "float64" else "float32"
        w.inputs["feats"] = f"torch.randn({sizes}, {d // parts}, dtype=torch.{kind}, requires_grad=True)"
        w.line(f"beside = {made}")
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
    head(w)
    if decoder.outputs == "logits":
        return "logits"
    loss(w)
    if any("aux + " in line for line in w.lines):
        w.line("loss = loss + 0.1 * aux")
    if decoder.extra != "none":
        lines = LINES[decoder.extra]
        w.line(*lines, "loss = loss + term")
        for name, rank in PARAMETERS.items():
            if f"self.{name}" in "".join(lines):
                w.parameter(name, *([decoder.width] * rank or [1]))
    if decoder.outputs == "views":
        views = (
            "x[:, x.shape[1] // 2 :]",
            "x[..., x.shape[1] // 9 :].transpose(0, 1)",
            "x.flatten(0, 1)",
            "x.flatten(0, 1)[3:9]",
            "(polar := torch.polar(x, x))[:, 1:].detach()",
            "polar.detach().conj().imag",
            "x.detach()",
            "x.mT.detach()",
            "labels[:, labels.shape[1] // 2 :]",
        )
        return ", ".join(("loss", "x", *views))
    return "loss" if decoder.outputs == "loss" else "loss, logits"


def _outside(decoder: Decoder) -> str:
    """The loss of a decoder that returns its logits, as a function of these."""
    if decoder.outputs != "logits":
        return ""
    w = Writer(decoder)
    w.line("labels = inputs['labels']", *_sizes(w))
    loss(w)
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
    """A row less than all, where these are as many chunks nevertheless; of other lengths, more than there are."""
    fewest = min(decoder.chunk_size, decoder.loss_chunk_size, decoder.also)
    return decoder.length - 1 if fewest > 1 and decoder.length > 1 and decoder.calls == "one" else 10_000
