"""MLPs, mixers along the sequence, and how a block is wired, as lines of a program."""

from collections.abc import Callable
from random import Random
from typing import Any, TypeAlias

from tests.random_decoders.attention import attend
from tests.random_decoders.mixers import ASSOCIATIVE, BYTES, COUNTS, DECAYS, KEYS, SCANS, STATEFUL, UNCHUNKED, VARIANTS
from tests.random_decoders.specification import Layer
from tests.random_decoders.writer import Writer

EXPERTS, CHOSEN = 3, 2
Join: TypeAlias = "Callable[[str], str]"  # the line that adds a result to the block


def block(w: Writer, layer: Layer, i: int) -> None:
    """Write one block, from `x` to `x`."""
    before, after = (f"{name}{i}" for name in ("before", "after"))
    norm, other = (w.norm(layer.norm, name, w.decoder.width) for name in (before, after))
    if w.decoder.skips and i == 0:
        w.line("skip = x")
    match layer.wiring:
        case "pre":
            _mixed(w, layer, f"{norm}(x)", i, lambda y: f"x = x + {y}")
            _fed(w, layer, f"{other}(x)", i, lambda y: f"x = x + {y}")
        case "post":
            _mixed(w, layer, "x", i, lambda y: f"x = {norm}(x + {y})")
            _fed(w, layer, "x", i, lambda y: f"x = {other}(x + {y})")
        case "sandwich":
            third = w.norm(layer.norm, f"third{i}", w.decoder.width)
            _mixed(w, layer, f"{norm}(x)", i, lambda y: f"x = x + {third}({y})")
            _fed(w, layer, f"{other}(x)", i, lambda y: f"x = x + {third}({y})")
        case "parallel":
            w.line("h = x")
            _mixed(w, layer, f"{norm}(h)", i, lambda y: f"x = x + {y}")
            _fed(w, layer, f"{norm}(h)", i, lambda y: f"x = x + {y}")
        case "scaled":
            scale = w.parameter(f"scale{i}", w.decoder.width)
            _mixed(w, layer, f"{norm}(x)", i, lambda y: f"x = x + {scale} * {y}")
            _fed(w, layer, f"{other}(x)", i, lambda y: f"x = x + {scale} * {y}")
        case "streams":
            w.line("stream = stream if stream is not None else x")
            _mixed(w, layer, f"{norm}(x)", i, lambda y: f"stream = stream + {y}")
            _fed(w, layer, f"{other}(stream)", i, lambda y: f"x = x + {y}")
        case "gated":
            gate = w.linear(f"gate{i}", w.decoder.width, 1)
            _mixed(w, layer, f"{norm}(x)", i, lambda y: f"x = x + torch.sigmoid({gate}(x)) * {y}")
            _fed(w, layer, f"{other}(x)", i, lambda y: f"x = x + {y}")
        case "mixed streams":
            w.line("h = torch.stack((x, 0.5 * x), -2)", f"x = ({w.parameter(f'read{i}', 2, 1)} * h).sum(-2)")
            _mixed(w, layer, f"{norm}(x)", i, lambda y: f"h = h + {w.parameter(f'write{i}', 2, 1)} * {y}.unsqueeze(-2)")
            w.line("x = h.mean(-2)")
            _fed(w, layer, f"{other}(x)", i, lambda y: f"x = x + {y}")
    if w.decoder.skips and i + 1 == len(w.decoder.layers):
        w.line("x = x + 0.5 * skip")


def _mixed(w: Writer, layer: Layer, x: str, i: int, join: Join) -> None:
    """The part of a block that reads other rows."""
    w.line(f"z = {x}")
    _mix(w, layer, i)
    if layer.core != "none":
        attend(w, layer, "z", i)
        w.line(join("y"))
    elif layer.mixer != "none":
        w.line(join("z"))


def _mix(w: Writer, layer: Layer, i: int) -> None:
    """Mixes `z` with earlier rows."""
    time, d = w.layout.time, w.decoder.width
    match layer.mixer:
        case "shift":
            w.line(f"past = torch.cat((torch.zeros_like({w.layout.cut('z', ':1')}), {w.layout.cut('z', ':-1')}), {time})")
            w.line(f"z = z + {w.parameter(f'shift{i}', d)} * (past - z)")
        case "convolution":
            w.own.append(f"self.conv{i} = nn.Conv1d({d}, {d}, 3, groups={d}, padding=2)")
            there, back = {
                "time first": ("z.permute(1, 2, 0)", ".permute(2, 0, 1)"),
                "unbatched": ("z.t()[None]", "[0].t()"),
            }.get(w.decoder.layout, ("z.transpose(1, 2)", ".transpose(1, 2)"))
            w.line(f"z = F.silu(self.conv{i}({there})[..., :t]){back}")
        case "cumulative sum":
            w.line(f"z = z.cumsum({time}) * 0.5")
        case "cumulative mean":
            shape = ", 1" * (2 if w.decoder.layout == "time first" else 1)
            w.line(f"z = z + z.cumsum({time}) / (at + 1).view(t{shape})")
        case "recurrence":
            _recur(w, time)
        case form if form in SCANS:
            _scan(w, form, i, time)
        case form if form in ASSOCIATIVE:
            _combine(w, form, i, time)
        case operator if operator in STATEFUL:
            _stateful(w, operator, i)
        case form if form in DECAYS:
            _decayed(w, form, i)
        case form if form in UNCHUNKED:
            w.line(UNCHUNKED[form].format(time=time))


def _recur(w: Writer, time: int) -> None:
    """A loop over rows, one of several recurrences; all rows may use the last state."""
    row, seed = f"z.select({time}, i)", w.decoder.seed
    w.line(
        f"state = before = torch.zeros_like(z.select({time}, 0))",
        "states = []",
        "for i in range(t):",
        f"    {VARIANTS['recurrences'][seed % 3].format(row=row)}",
        "    states.append(state)",
        f"z = torch.stack(states, {time})" + (f" + 0.1 * before.unsqueeze({time})" if seed % 2 else ""),
    )


def _scan(w: Writer, form: str, i: int, time: int) -> None:
    """A scan; all rows may use the last state, and the first one may be a parameter."""
    d, seed = w.decoder.width, w.decoder.seed
    shown = f"z.select({time}, 0)"
    first = f"{shown}.new_zeros({shown}.shape)" if seed % 3 else f"({shown} * {w.parameter(f'first{i}', d)}).contiguous()"
    if "mixed" in SCANS[form]:
        w.line(f"mixed = {w.parameter(f'mixed{i}', d, d)}")
    w.line(f"last, z = scan({SCANS[form].format(first=first, time=time)})")
    if form == "reset":  # zeros have a sign
        w.line(f"z = z + torch.copysign({w.parameter(f'sign{i}', d)}, last).unsqueeze({time})")
    elif seed % 2:
        w.line(f"z = z + 0.1 * ({'last[0]' if form == 'of two' else 'last'}).unsqueeze({time})")


def _combine(w: Writer, form: str, i: int, time: int) -> None:
    """An associative scan."""
    function, rows, result = ASSOCIATIVE[form]
    if "mixed" in function:
        w.line(f"mixed = {w.parameter(f'mixed{i}', w.decoder.width, w.decoder.width)}")
    way = ", reverse=True" if form == "from behind" else ""
    w.line(f"y = associative_scan({function}, {rows}, {time}, combine_mode='generic'{way})")
    sign = w.parameter(f"sign{i}", w.decoder.width) if "sign" in result else ""
    w.line(f"z = {result.format(sign=sign, time=time)}")


def _stateful(w: Writer, operator: str, i: int) -> None:
    """An operator with a state, of all rows or of those after the first; all rows may use the last state."""
    d, seed = w.decoder.width, w.decoder.seed
    there, back = w.batch_first
    call, shape, of_last = STATEFUL[operator]
    start = 1 if seed % 5 == 0 else 0
    first = f"first.expand(len(r), *{shape.format(d=d)}).clone()" if seed % 3 == 0 or operator == "averages" else "None"
    w.line(f"mixed = {w.parameter(f'mixed{i}', d, max(d, 3))}[:, :{d if operator != 'windows' else max(d, 3)}]")
    w.line(f"r = {there}[:, {start}:]", f"first = r[:, :1].mean() * {w.parameter(f'first{i}', *eval(shape.format(d=d)))} + 1")
    w.line(f"y, last = {call.format(first=first, asks=seed % 2 == 1)}")
    if operator == "blocks":
        w.line("y = y[:, :, 0]")
    w.line("y = F.pad(y.mT if " + str(operator == "windows") + f" else y, [0, 0, {start}, 0])")
    w.line("y = y" + (f" + 0.1 * {of_last}[:, None]" if seed % 2 else ""), f"z = y{back}")


def _decayed(w: Writer, form: str, i: int) -> None:
    """A product with weights that decay, over rows or over blocks of rows."""
    random, (there, back) = Random(w.decoder.seed * 7 + i), w.batch_first
    names: dict[str, Any] = {
        "strict": random.choice((-1, -1, -1, -1, 0, -2)),
        "diagonal": random.choice((0, 0, 0, 0, 1, -1)),
        "hidden": random.choice(("-torch.inf", "-torch.inf", "-1e9", "-30.0")),
    }
    w.line(f"r = {there}", f"a = {random.choice(VARIANTS['logarithms'])}")
    names |= {name: random.choice(VARIANTS[name]).format(**names) for name in ("totals", "weights")}
    if has_blocks := form == "decays of blocks":
        first = f"s.new_ones(len(s), 1, 1) * {w.parameter(f'first{i}', w.decoder.width)}"
        names |= {"first": random.choice(("torch.zeros_like(s[:, :1])", first)), "size": random.choice((2, 3))}
    names["product"] = random.choice(VARIANTS["products"])
    w.line(*(line.format(**names) for line in DECAYS[form]))
    if has_blocks and random.random() < 0.3:
        w.line("y = y + 0.1 * v[:, -1][:, None]")
    w.line(f"z = y{back}")


def _fed(w: Writer, layer: Layer, x: str, i: int, join: Join) -> None:
    """The MLP, and the line that adds its result."""
    if layer.mlp != "none":
        w.line(f"z = {x}")
        w.line(f"m = {_mlp(w, layer, i)}")
        w.line(join("m"))


def _mlp(w: Writer, layer: Layer, i: int) -> str:
    """An MLP of `z`, as an expression."""
    d, wide = w.decoder.width, w.decoder.width + 1
    down = w.linear(f"down_mlp{i}", wide, d, bias=layer.mlp == "plain") if "experts" not in layer.mlp else ""
    match layer.mlp:
        case "plain":
            return f"{down}(F.gelu({w.linear(f'up_mlp{i}', d, wide, bias=True)}(z)))"
        case "gated":
            return f"{down}(F.silu({w.linear(f'gate_mlp{i}', d, wide)}(z)) * {w.linear(f'up_mlp{i}', d, wide)}(z))"
        case "fused":
            w.line(f"left, right = {w.linear(f'up_mlp{i}', d, 2 * wide)}(z).chunk(2, dim=-1)")
            return f"{down}(F.gelu(left, approximate='tanh') * right)"
        case "squared":
            return f"{down}(F.relu({w.linear(f'up_mlp{i}', d, wide)}(z)).square())"
        case "sorted experts":
            return _sorted_experts(w, layer, i)
        case _:
            return _experts(w, layer, i)


def _sorted_experts(w: Writer, layer: Layer, i: int) -> str:
    """Rows that are sorted by expert, multiplied in groups, and put back in one of several ways."""
    d, seed = w.decoder.width, w.decoder.seed
    keys, count = BYTES.get(layer.keys_of_experts) or (KEYS[layer.keys_of_experts], EXPERTS)
    experts, rows = w.parameter(f"experts{i}", count, d, d), VARIANTS["rows of experts"][seed % 2]
    w.line(
        f"top, group = torch.softmax({w.linear(f'router{i}', d, count)}(z), -1).topk({CHOSEN}, dim=-1)",
        "group = group.reshape(-1)",
        f"order = {keys}" + (".sort()[1]", ".argsort(stable=True)")[seed % 2],
        COUNTS[layer.counts].format(n=count),
        f"rows = torch.ops.transformers.grouped_mm_fallback({rows}.to({experts}.dtype), {experts}, ends)",
        "rows = F.silu(rows) * top.reshape(-1)[order].unsqueeze(1)",
    )
    return f"({VARIANTS['rows in order'][seed % 3].format(d=d)}).view_as(z)"


def _experts(w: Writer, layer: Layer, i: int) -> str:
    d, tokens = w.decoder.width, "(0,)" if w.decoder.layout == "unbatched" else "(0, 1)"
    w.line(f"p = torch.softmax({w.linear(f'router{i}', d, EXPERTS)}(z), -1)", "chosen = p")
    if layer.mlp == "top experts":
        w.line(f"top, index = p.topk({CHOSEN}, dim=-1)", "chosen = torch.zeros_like(p).scatter(-1, index, top)")
    w.line(f"aux = aux + {EXPERTS} * (p.mean({tokens}) * (chosen > 0.3).to(p.dtype).mean({tokens})).sum()")
    w.line(f"each = F.silu(torch.einsum('...d,nde->...ne', z, {w.parameter(f'experts{i}', EXPERTS, d, d)}))")
    return "(each * chosen.unsqueeze(-1)).sum(-2)"
