"""Attention as lines of a program: projections, positions, masks, and a core of one of many kinds."""

from tests.random_decoders.masks import BENT, CORES, FILLS, GROUPS, HIDING, ROTARY, SINKS, TABLES, VISIBLE, arithmetic
from tests.random_decoders.specification import Layer
from tests.random_decoders.writer import Writer

LONGEST, REACH = 40, 3


def attend(w: Writer, layer: Layer, x: str, i: int) -> str:
    """Write attention on `x`; the result is in `y`."""
    heads, size = w.decoder.heads, w.decoder.head_size
    key_heads = heads if layer.groups == "none" else heads // 2
    value_size = size + 1 if layer.wide_values else size
    _project(w, layer, x, i, key_heads, value_size)
    _position(w, layer, i)
    _share(w, layer, i)
    w.line(*GROUPS.get(layer.groups, ()))
    if w.layout.is_folded:
        w.line("q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)")
    _core(w, layer, i)
    if w.layout.is_folded:
        w.line(f"y = y.view(b, {heads}, t, {value_size})")
    w.line(f"y = {w.linear(f'o{i}', heads * value_size, w.decoder.width)}({w.layout.merged('y', heads * value_size)})")
    return "y"


# -- before the core


def _project(w: Writer, layer: Layer, x: str, i: int, key_heads: int, value_size: int) -> None:
    d, heads, size = w.decoder.width, w.decoder.heads, w.decoder.head_size
    widths = heads * size, key_heads * size, key_heads * value_size
    split = {"q": (heads, size), "k": (key_heads, size), "v": (key_heads, value_size)}
    match layer.projection:
        case "fused":
            w.line(f"q, k, v = {w.linear(f'qkv{i}', d, sum(widths))}({x}).split({list(widths)}, dim=-1)")
        case "low rank":
            w.line(f"c = {w.linear(f'down{i}', d, 3)}({x})")
            w.line(f"q = {w.linear(f'q{i}', d, widths[0])}({x})")
            w.line(f"k, v = {w.linear(f'up{i}', 3, sum(widths[1:]))}(c).split({list(widths[1:])}, dim=-1)")
        case kind:
            for name, width in zip("qkv", widths, strict=True):
                w.line(f"{name} = {w.linear(f'{name}{i}', d, width, bias=kind == 'biased')}({x})")
    for name, (number, own) in split.items():
        w.line(f"{name} = {w.layout.heads(name, number, own)}")


def _position(w: Writer, layer: Layer, i: int) -> None:
    size = w.decoder.head_size
    if layer.query_norm:
        w.line(*(f"{n} = {w.norm('spelled', f'{n}_norm{i}', size)}({n})" for n in "qk"))
    turned = 2 if layer.rotary == "partial" else size
    w.line(*(line.format(turned=turned) for line in ROTARY[layer.rotary]))


def _share(w: Writer, layer: Layer, i: int) -> None:
    if i == 0:
        w.line("first_k, first_v = k, v")
    elif layer.keys == "shared":
        w.line("k, v = first_k, first_v")
    elif layer.keys == "value residual":
        w.line("v = v + 0.5 * first_v")


# -- masks


def _visible(w: Writer, layer: Layer, i: int) -> bool:
    """Write `seen`, which keys each row sees; return False if it sees all."""
    heads = w.decoder.heads
    match layer.mask:
        case "none":
            return False
        case "buffer":
            w.own.append(f"self.register_buffer('tril{i}', torch.ones({LONGEST}, {LONGEST}).tril())")
            w.line(f"seen = self.tril{i}[:t, :t] != 0")
        case "padding":
            sizes = w.layout.sizes.replace("b", str(w.decoder.batch)).replace("t", str(w.decoder.length))
            w.inputs["attention_mask"] = f"(torch.rand({sizes}) > 0.3).long()"
            w.line(f"seen = (at[:, None] >= at) & {w.layout.keys('attention_mask.bool()', heads)} | (at[:, None] == at)")
        case "packed":
            w.line(f"document = (labels == 1).cumsum({w.layout.time})")
            same = f"({w.layout.rows('document', heads)} == {w.layout.keys('document', heads)})"
            w.line(f"seen = (at[:, None] >= at) & {same}")
        case "arithmetic":
            w.line(*arithmetic(layer.positions, layer.apart, layer.relation, layer.together))
        case name:
            w.line(f"seen = {VISIBLE[name]}")
    return True


def _biased(w: Writer, layer: Layer, i: int, scores: str) -> None:
    """Write a bias by positions, or a soft cap, into `scores`."""
    heads = w.decoder.heads
    match layer.bias:
        case "alibi":
            slopes = w.layout.per_head(f"torch.tensor({[2.0**-n for n in range(1, heads + 1)]}, dtype=q.dtype)")
            w.line(f"{scores} = {scores} - {slopes} * (at[:, None] - at).abs()")
        case "relative":
            table = w.embedding(f"relative{i}", 2 * REACH + 1, heads)
            w.line(f"distance = (at - at[:, None]).clamp(-{REACH}, {REACH}) + {REACH}")
            w.line(f"{scores} = {scores} + {w.layout.pair_per_head(f'{table}(distance).permute(2, 0, 1)')}")
        case "softcap":
            w.line(f"{scores} = 2 * torch.tanh({scores} / 2)")


def _bent(w: Writer, layer: Layer, i: int, scores: str) -> None:
    """Hide keys by data, activations or tables, in `scores`."""
    heads, line = w.decoder.heads, BENT[layer.bent]
    if layer.bent == "none":
        return
    if "{gate}" in line:
        gate = f"{w.linear(f'gate_of_keys{i}', w.decoder.width, 1)}(z).squeeze(-1)"
        w.line(f"gate = {w.layout.keys(gate, heads)}")
    if "{number}" in line:
        v = w.decoder.vocabulary
        w.own.append(f"self.register_buffer('banned', torch.where(torch.arange({v}) % 3 == 0, -torch.inf, 0.0))")
        w.line(f"number = {TABLES[layer.table].format(v=v)}", f"number = {w.layout.keys('number', heads)}")
    keep, eye = w.layout.keys("(labels % 3 != 0)", heads), f"torch.eye(t, dtype={scores}.dtype)"
    w.line(f"{scores} = {line.format(s=scores, gate='gate', number='number', keep=keep, eye=eye)}")


def _softmax(w: Writer, layer: Layer, i: int) -> None:
    """Write masked probabilities `p` from `scores`."""
    _biased(w, layer, i, "scores")
    if not layer.bent_last:
        _bent(w, layer, i, "scores")
    hides = _visible(w, layer, i)
    if hides and layer.hiding in FILLS:
        w.line(f"scores = scores.masked_fill(~seen, {FILLS[layer.hiding].format(s='scores')})")
    elif hides and layer.hiding in HIDING:
        w.line(f"scores = {HIDING[layer.hiding]}")
    if layer.bent_last:
        _bent(w, layer, i, "scores")
    if layer.sinks != "none":
        _with_sink(w, layer, i)
        return
    w.line("p = torch.softmax(scores, -1)")
    if hides and layer.hiding == "renormalise":
        w.line("p = p * seen", "p = p / p.sum(-1, keepdim=True)")


def _with_sink(w: Writer, layer: Layer, i: int) -> None:
    """Write probabilities with a sink, which takes some of the mass."""
    w.own.append(f"self.sink{i} = nn.Parameter(torch.randn({w.decoder.heads}) * 0.5 - {SINKS[layer.sinks]})")
    sink = w.layout.per_head(f"self.sink{i}")
    sink = f"{sink}.expand(*scores.shape[:-1], 1).to(scores.dtype)"
    if layer.sinks == "front":
        w.line(f"scores = torch.cat(({sink}, scores), -1)", "p = torch.softmax(scores, -1)[..., 1:]")
    else:
        w.line(f"scores = torch.cat((scores, {sink}), -1)", "p = torch.softmax(scores, -1)[..., :-1]")


# -- cores


def _core(w: Writer, layer: Layer, i: int) -> None:
    grouped = ", enable_gqa=True" if layer.groups == "enable" else ""
    match layer.core:
        case "causal":
            w.line(f"y = F.scaled_dot_product_attention(q, k, v, is_causal=True{grouped})")
        case "boolean":
            mask = "seen" if _visible(w, layer, i) else "None"
            w.line(f"y = F.scaled_dot_product_attention(q, k, v, attn_mask={mask}{grouped})")
        case "biased":
            hides = _visible(w, layer, i)
            w.line("mask = torch.zeros(t, t, dtype=q.dtype)")
            _biased(w, layer, i, "mask")
            if not layer.bent_last:
                _bent(w, layer, i, "mask")
            if hides:
                w.line(f"mask = mask.masked_fill(~seen, {FILLS.get(layer.hiding, '-torch.inf').format(s='mask')})")
            if layer.bent_last:
                _bent(w, layer, i, "mask")
            w.line(f"y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype){grouped})")
        case "matmul":
            w.line("scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5")
            _softmax(w, layer, i)
            w.line("y = p @ v")
        case "einsum":
            w.line("scores = torch.einsum('...qe,...ke->...qk', q, k) / 2")
            _softmax(w, layer, i)
            w.line("y = torch.einsum('...qk,...ke->...qe', p, v)")
        case "differential":
            _differential(w, layer, i)
        case "sigmoid":
            _sigmoid(w, layer, i)
        case core:
            w.line(*CORES[core])


def _differential(w: Writer, layer: Layer, i: int) -> None:
    """Two softmaxes of half of the head each, one subtracted from the other."""
    w.line("(q1, q2), (k1, k2) = q.chunk(2, dim=-1), k.chunk(2, dim=-1)", "scores = q1 @ k1.transpose(-2, -1)")
    _softmax(w, layer, i)
    w.line("p1, scores = p, q2 @ k2.transpose(-2, -1)")
    if layer.mask != "none":
        w.line("scores = scores.masked_fill(~seen, -torch.inf)")
    w.line(f"y = (p1 - {w.parameter(f'lambda{i}', 1)} * torch.softmax(scores, -1)) @ v")


def _sigmoid(w: Writer, layer: Layer, i: int) -> None:
    """Attention without a softmax."""
    w.line("scores = q @ k.transpose(-2, -1)")
    _biased(w, layer, i, "scores")
    p = "torch.sigmoid(scores)"
    w.line(f"y = ({p} * seen) @ v" if _visible(w, layer, i) else f"y = {p} @ v")
