"""Terms beside the loss, of the last x [b t d] and labels [b t], as lines of a program: of rows and of blocks of rows."""

from __future__ import annotations

from itertools import product

# -- terms of blocks of rows that read one table, made of no rows: each of these readers may have axes of its own

_BLOCKS = "y = [(x[:, i : i + 3], min(3, t - i)) for i in range(0, t, 3)]"
TABLES: dict[str, tuple[str, ...]] = {
    name: (_BLOCKS, f"d = {table}", f"z = torch.cat([{made} for u, n in y], 1)", f"term = ({used}).square().mean()")
    for name, table, made, used in (
        ("decays of blocks", "(torch.arange(3.0) * -0.3).exp().to(x)[:, None]", "u * d[:n]", "z * x"),
        ("decays from the end", "(torch.arange(3.0) * -0.3).exp().to(x)[:, None]", "u * d[-n:]", "z.cumsum(1)"),
        ("pairs of blocks", "(torch.arange(9.0) * 0.3).cos().view(3, 3).tril().to(x)", "((u @ u.mT) * d[:n, :n]) @ u", "z * x"),
        ("a table of all rows", "(at * 0.3).cos().to(x)[:, None]", "u * d[:n]", "z * x * d"),
        ("a trained table", "self.one[:1, None].expand(3, 1) * 0.5", "u * d[:n]", "z * x"),
        ("rows turned by a table", "(torch.arange(3.0) * 0.3).cos().to(x)[:, None]", "u.flip(1) * d[:n]", "z * x"),
        ("one block of a table", "(torch.arange(3.0) * 0.3).cos().to(x)[:, None]", "y[0][0] * d[: min(3, t)]", "z.sum(1)"),
    )
}


# -- terms of rows that are sorted, worked on in their new order, and put back, or not quite

_COLUMNS = "[..., None].expand_as(x)"
ORDERS: dict[str, tuple[str, ...]] = {
    f"{name} of {keys}": (
        f"p = ({number}).argsort(1)",
        f"z = x.gather(1, p{_COLUMNS})",
        f"z = {made}",
        f"n = {undone}",
        f"term = ({used}).square().mean()",
    )
    for keys, number in (("labels", "labels % 4"), ("rows", "x.detach()[..., 0]"), ("places", "at.flip(0).expand_as(labels)"))
    for name, made, undone, used in (
        ("neighbours", "z.cumsum(1).sin()", "p.argsort(1)", f"z.gather(1, n{_COLUMNS}) * x"),
        ("rows scattered", "z * 2", "torch.zeros_like(p).scatter(1, p, at.expand_as(p))", f"z.gather(1, n{_COLUMNS}) * x"),
        ("rows alone", "z.square()", "p.argsort(1)", f"z.gather(1, n{_COLUMNS})"),
        ("the same order", "z.cumsum(1).sin()", "p", f"z.gather(1, n{_COLUMNS}) * x"),
        ("the order of largest", "z.cumsum(1).sin()", "p.argsort(1, descending=True)", f"z.gather(1, n{_COLUMNS}) * x"),
        ("added rows", "z.cumsum(1).sin()", "p.argsort(1)", f"torch.zeros_like(x).scatter_add(1, n{_COLUMNS}, z) * x"),
        ("rows added in order", "z.cumsum(1).sin()", "p", f"torch.zeros_like(x).scatter_add(1, n{_COLUMNS}, z)"),
    )
}


# -- terms of blocks of rows that loops cut out, beside all blocks at once

_WHOLE = "y, n = x[:, : t - t % 3].contiguous(), t - t % 3"
_VIEW = "v = y.unflatten(1, (-1, 3)) if n else y[:, :, None]"
_DECAYED = "sum((y[:, i : i + 3].sum(1) * 0.5 ** (j - i) for i in range(0, j, 3)), 0 * x[:, 0])"
LOOPS: dict[str, tuple[str, ...]] = {
    name: (_WHOLE, _VIEW, f"z = ({made}) if n > {least} else y", f"term = ({used}).square().mean()")
    for name, made, least, used in (
        (
            "states of blocks",
            f"(v * torch.stack([{_DECAYED} for j in range(0, n, 3)], 1)[:, :, None]).flatten(1, 2)",
            0,
            "torch.cat([z, x[:, n:]], 1) * x",
        ),
        (
            "blocks in turn beside a view",
            "torch.cat([y[:, i : i + 3].cumsum(1) for i in range(0, n, 3)], 1) * v.softmax(2).flatten(1, 2)",
            0,
            "torch.cat([z, x[:, n:].sin()], 1) * x",
        ),
        ("blocks between those of a view", "v[:, 1:].flatten(1, 2) * y[:, 1:-2]", 5, "z.sum(1)"),
        ("one block of a view", "v * y[:, None, 3:6]", 5, "z"),
        ("the last block of a view", "v.sin() * y[:, None, -3:]", 5, "z"),
        (
            "blocks that are written",
            "y.slice_scatter(y[:, :3].sin(), 1, 3, 6).slice_scatter(y[:, 3:6].cos(), 1, 0, 3)[:, 1:6] * v[:, :1, 0]",
            5,
            "z.cumsum(1)",
        ),
        ("blocks of a sum", "(v.cos().flatten(1, 2) + y)[:, 3:6] * v[:, 0]", 5, "z"),
    )
}


# -- terms of blocks with as many rows as a row has numbers, or of as many blocks as one has rows: no size says what is what

_WIDE = ("w = x.shape[-1]", "n = t - t % w", "v = x[:, :n].unflatten(1, (-1, w)) if n else x[:, :, None].expand(b, t, w, w)")
_MANY = ("w = int(t**0.5)", "v = x[:, : w * w].unflatten(1, (w, w))")
_OF_WIDE = {
    "tables along both": "v * self.one[:, None] * self.two",
    "one table along both": "v * self.one[:, None] * self.one",
    "turned": "v * v.mT.sin()",
    "turned and joined": "v.mT.flatten(1, 2).cumsum(1)",
    "products": "v @ v",
    "products with rows": "self.square @ v",
    "products with numbers": "(v @ self.square).sin() @ v.mT",
    "products with both": "self.square @ v @ self.square.mT",
    "scores inside": "(v @ v.mT).tril().softmax(-1) @ v",
    "scores of numbers": "(v.mT @ v).softmax(-1) @ v.mT",
    "diagonals": "v.diagonal(0, 2, 3) * self.one",
    "sums of both": "v.sum(2) * v.sum(3)",
    "running along both": "v.cumsum(2) * v.cumsum(3).mT",
    "triangles": "v.tril() + v.triu(1).mT",
    "norms along both": "F.rms_norm(v, (w,)) * F.rms_norm(v.mT, (w,))",
    "means of blocks": "v - v.mean(1, keepdim=True) * v.mean(2, keepdim=True)",
    "states": "torch.stack([sum(v[:, :i].unbind(1), 0 * v[:, 0]) @ self.square for i in range(v.shape[1])], 1) * v",
}
_OF_MANY = {
    "turned": "v * v.transpose(1, 2)",
    "turned and joined": "v.transpose(1, 2).flatten(1, 2).cumsum(1)",
    "products": "torch.einsum('bnld,blmd->bnmd', v, v)",
    "scores between": "torch.einsum('bnld,bmld->bnm', v, v).softmax(-1) @ v.flatten(2)",
    "diagonals": "v.diagonal(0, 1, 2)",
    "sums of both": "v.sum(1) * v.sum(2)",
    "running along both": "v.cumsum(1) + v.cumsum(2).transpose(1, 2).sin()",
    "norms along both": "v.softmax(1) * v.softmax(2)",
}
_IN_TURN = "torch.cat([{part} for part in x.split(x.shape[-1], 1)], 1) * x"
_PARTS = {
    "tables in turn": "part * self.one[: part.shape[1], None] * self.two",
    "one table in turn": "part * self.one[: part.shape[1], None] * self.one",
    "products in turn": "self.square[: part.shape[1], : part.shape[1]] @ part @ self.square",
    "scores in turn": "(part @ part.mT).tril() @ part",
}
SQUARES: dict[str, tuple[str, ...]] = {
    **{f"wide, {name}": (*_WIDE, f"z = {made}", "term = z.square().mean()") for name, made in _OF_WIDE.items()},
    **{f"many, {name}": (*_MANY, f"z = {made}", "term = z.square().mean()") for name, made in _OF_MANY.items()},
    **{name: (f"z = {_IN_TURN.format(part=part)}", "term = z.square().mean()") for name, part in _PARTS.items()},
}


# -- terms of rows that see blocks of rows, each made one: by themselves, or joined with the rows; hidden until they end, or not

_OVER_WHOLE = "y, n = x[:, : t - t % 3], t // 3"
_OVER_VIEW = "v = y.unflatten(1, (-1, 3)) if n else x[:, :, None]"
_MADE = {
    "means": ("c = v.mean(2)",),
    "weighted": ("c = (v * (v.sin() * 3).softmax(2)).sum(2)",),
    "first rows": ("c = v[:, :, 0].sin()",),
    "overlapping": (
        "w = F.pad(v.sin(), (0, 0, v.shape[2], 0))",
        "w = w.slice_scatter(w[:, 1:].slice_scatter(v[:, :-1], 2, 0, v.shape[2]), 1, 1)",
        "c = (w * w.softmax(2)).sum(2)",
    ),
}
_DONE = "e = torch.arange(c.shape[1]) < ((at + 1) // v.shape[2])[:, None]"
_ROWS = "r = (at <= at[:, None]) & (at > at[:, None] - 4)"
_BIASES = "m, k = (torch.zeros_like(s, dtype=x.dtype).masked_fill(~s, {number}) for s in (r, e))"
_JOINED = "z, k = torch.cat((x, c), 1)[:, None], torch.cat((m, k), 1)"
_USED: dict[str, tuple[str, ...]] = {
    "seen by all": ("z = (x @ c.mT).softmax(2) @ c.sin()",),
    "seen when done": ("z = (x @ c.mT).masked_fill(~e, -1e30).softmax(2) @ c",),
    "summed": ("z = (x @ c.mT).tanh().mT @ x.sin()",),
    "the best": (
        "s = (x @ c.mT).relu().masked_fill(~e, -1)",
        "k = torch.full_like(s, -torch.inf).scatter(2, s.topk(min(2, s.shape[2]), 2).indices, 0.0)",
        "z = F.scaled_dot_product_attention(x[:, None], c[:, None], c[:, None].sin(), attn_mask=k[:, None])",
    ),
    "joined": (_BIASES.format(number="-torch.inf"), _JOINED, "z = F.scaled_dot_product_attention(x[:, None], z, z, attn_mask=k)"),
    "joined, hidden by numbers": (
        _BIASES.format(number="torch.finfo(x.dtype).min"),
        _JOINED,
        "z = F.scaled_dot_product_attention(x[:, None], z.sin(), z, attn_mask=k)",
    ),
    "joined, by flags": (
        "z = torch.cat((c, x), 1)[:, None]",
        "z = F.scaled_dot_product_attention(x[:, None], z, z, attn_mask=torch.cat((e, r), 1))",
    ),
    "joined, seen by all": ("z = torch.cat((x, c), 1)[:, None]", "z = F.scaled_dot_product_attention(x[:, None], z, z)"),
    "joined, some rows see none": (
        "m, k = (torch.zeros_like(s, dtype=x.dtype).masked_fill(~(s & (at > 1)[:, None]), -9e30) for s in (r, e))",
        _JOINED,
        "z = F.scaled_dot_product_attention(x[:, None], z, z, attn_mask=k)",
    ),
    "joined, spelled out": (
        "z = torch.cat((x, c), 1)",
        "z = (x @ z.mT).masked_fill(~torch.cat((r, e), 1), -torch.inf).softmax(2) @ z",
    ),
    "joined, the other way": ("z = torch.cat((x, c), 1)", "z = z.cumsum(1).sin() * z"),
    "queries": ("z = (c @ x.mT).masked_fill(~e.mT, -1e30).softmax(2) @ x",),
    "among themselves": ("z = (c @ c.mT).softmax(2) @ c",),
}
COMPRESSED: dict[str, tuple[str, ...]] = {
    f"{made}, {used}": (
        _OVER_WHOLE,
        _OVER_VIEW,
        *_MADE[made],
        _DONE,
        _ROWS,
        *_USED[used],
        "term = z.square().square().mean()",
    )
    for made, used in product(_MADE, _USED)
}


# -- terms of blocks of three rows that a loop cuts out of the sequence, works on one by one, and joins; the last may be shorter

_STARTED = ("d, o, m = x.shape[-1], [], x.new_zeros(len(x))", "s = x.new_zeros(len(x), d, d)")
_LOOP, _SPLIT = "for i in range(0, t, 3):", "for i, y in enumerate(x.split(3, 1)):"
_TWO = "for y, z in zip(x.split(3, 1), x.cos().split(3, 1), strict=True):"
_BLOCK, _NEXT = "    y = x[:, i : i + 3]", "    s = 0.5 * s.sin() + y.mT @ y.cos()"
_CUT_MADE = "    o.append(y @ s + (y @ y.mT).tril() @ y.sin())"
_CUT_JOINED = "torch.cat(o, 1) * x"


def _loop(*lines: str, loop: str = _LOOP) -> tuple[str, ...]:
    return (loop, *((_BLOCK,) if loop is _LOOP else ()), *lines)


CUT_OUT: dict[str, tuple[str, ...]] = {
    name: (*_STARTED, *lines, f"term = ({used}).square().mean()")
    for name, lines, used in (
        ("states of blocks cut out", _loop(_CUT_MADE, _NEXT), _CUT_JOINED),
        ("states of blocks split", _loop(_CUT_MADE, _NEXT, loop=_SPLIT), _CUT_JOINED),
        ("blocks cut out alone", _loop("    o.append((y @ y.mT).tril() @ y.sin())"), _CUT_JOINED),
        ("blocks split alone", _loop("    o.append(y.softmax(1) * y.cumsum(1))", loop=_SPLIT), _CUT_JOINED),
        ("states and the last one", _loop(_CUT_MADE, _NEXT), f"{_CUT_JOINED} + s.sum(1, keepdim=True)"),
        ("states behind blocks cut out", _loop(_NEXT, "    o.append(y @ s)"), _CUT_JOINED),
        ("the block before", _loop("    o.append(y * x[:, max(i - 3, 0) : i + 3].cos().mean(1, keepdim=True))"), _CUT_JOINED),
        ("the block behind", _loop("    o.append(y * x[:, i : i + 6].cos().mean(1, keepdim=True))"), _CUT_JOINED),
        ("all blocks so far", _loop("    o.append(y * x[:, : i + 3].cos().mean(1, keepdim=True))"), _CUT_JOINED),
        (
            "the first block",
            _loop(_CUT_MADE, "    s = 0.5 * s.sin() + y.mT @ y.cos() + x[:, :3].sum(1, keepdim=True)"),
            _CUT_JOINED,
        ),
        ("a step of its own", _loop(_CUT_MADE, _NEXT, "    s = s * 0.5 if i == 3 else s"), _CUT_JOINED),
        ("a step left out", _loop(_CUT_MADE, "    s = s if i == 6 else 0.5 * s.sin() + y.mT @ y.cos()"), _CUT_JOINED),
        ("a step cut off", _loop(_CUT_MADE, _NEXT, "    s = s.detach() if i == 3 else s"), _CUT_JOINED),
        ("blocks joined from the last", _loop(_CUT_MADE, _NEXT), "torch.cat(o[::-1], 1).sum(1)"),
        ("a row in front", _loop(_CUT_MADE, _NEXT), "torch.cat([x[:, :1], *o], 1)[:, :-1] * x"),
        ("parts of blocks", _loop("    o.append((y @ s)[:, :2])", _NEXT), "torch.cat(o, 1).sum(1)"),
        ("the last rows of blocks", _loop("    o.append(y[:, -1:] @ s)", _NEXT), "torch.cat(o, 1).cumsum(1).sum(1)"),
        (
            "states of every other block",
            _loop("    s = 0.5 * s.sin() + y.mT @ y.cos() if i % 2 else s", "    o.append(y @ s)"),
            _CUT_JOINED,
        ),
        (
            "two loops on the same blocks",
            (*_loop(_CUT_MADE, _NEXT), "p, r = [], s", *_loop("    p.append(y @ r)", "    r = 0.5 * r.cos() + y.mT @ y")),
            f"torch.cat(p, 1) * {_CUT_JOINED}",
        ),
        (
            "blocks from the last to the first",
            ("for i in reversed(range(0, t, 3)):", _BLOCK, "    o.append(y @ s)", "    s = 0.5 * s.sin() + y.mT @ y.cos()"),
            "torch.cat(o[::-1], 1) * x",
        ),
        (
            "numbers from block to block",
            _loop("    m = torch.maximum(0.9 * m, y.sum((1, 2)))", "    o.append(y * m[:, None, None])"),
            _CUT_JOINED,
        ),
        ("a last block nobody reads", (_TWO, "    o.append(y @ s)", "    s = 0.5 * s.sin() + z.mT @ z"), _CUT_JOINED),
        (
            "a first block nobody reads",
            (_TWO, "    o.append(z if not o else z + y @ s)", "    s = 0.5 * s.sin() + z.mT @ z"),
            _CUT_JOINED,
        ),
        ("single rows cut out", ("for i in range(t):", "    y = x[:, i : i + 1]", _CUT_MADE, _NEXT), _CUT_JOINED),
        (
            "heads cut out",
            ("for i in range(0, d, 2):", "    o.append(x[..., i : i + 2] * x[..., i : i + 1].cos())"),
            "torch.cat(o, -1) * x",
        ),
        (
            "sequences cut out",
            ("for i in range(len(x)):", "    m = m.sin() + x[i, 0, 0]", "    o.append(x[i : i + 1] * m[0])"),
            "torch.cat(o) * x",
        ),
    )
}


# -- terms of states that a loop over blocks of three rows writes into a buffer, `d` rows for each, and that are read by slice

_BUFFERS_STARTED = (
    "n, d = t // 3, x.shape[-1]",
    "y = x[:, : 3 * n].contiguous()",
    "v, s, m = y.view(len(x), n, 3, d), x.new_zeros(len(x), d, d), x.new_zeros(len(x))",
)
_STATE = "    s = 0.5 * s.sin() + y[:, 3 * i : 3 * i + 3].mT @ v[:, i].cos()"
_BEFORE = "    b = b.slice_scatter(s, 1, d * i, d * i + d)"
_BEHIND = "    b = b.slice_scatter(s, 1, d * i + d, d * i + 2 * d)"
_LAST = "b = b.slice_scatter(s, 1, d * n, d * n + d)"
_READ = "torch.cat([(v @ {states}.view(len(x), n, d, d)).flatten(1, 2), x[:, 3 * n :]], 1) * x"
_BUFFERS_LOOP, _FROM_BEHIND = "for i in range(n):", "for i in reversed(range(n)):"


def _buffer(rows: str, fill: str = "zeros") -> str:
    return f"b = x.new_{fill}(len(x), {rows}, d)"


_STATES = (_buffer("d * n + d"), _BUFFERS_LOOP, _BEFORE, _STATE, _LAST)
BUFFERS: dict[str, tuple[str, ...]] = {
    name: (*_BUFFERS_STARTED, *lines, f"term = ({used}).square().mean()")
    for name, lines, used in (
        ("states in front of blocks", _STATES, _READ.format(states="b[:, :-d]")),
        ("states behind blocks", (_buffer("d * n", "ones"), _BUFFERS_LOOP, _STATE, _BEFORE), _READ.format(states="b")),
        (
            "a first state that nobody writes",
            (_buffer("d * n + d", "ones"), _BUFFERS_LOOP, _STATE, _BEHIND),
            _READ.format(states="b[:, :-d]"),
        ),
        (
            "states and the rows behind them",
            (
                *_STATES,
                "r, rows = b[:, -d:].sum(1) * 0.5, [x[:, : 3 * n]]",
                "for i in range(3 * n, t):",
                "    r = 0.5 * r + x[:, i]",
                "    rows.append(r[:, None])",
            ),
            _READ.format(states="b[:, :-d]") + " * torch.cat(rows, 1)",
        ),
        (
            "numbers of blocks",
            (
                "b = x.new_zeros(len(x), n + 1)",
                _BUFFERS_LOOP,
                "    b = b.select_scatter(m, 1, i)",
                "    m = torch.maximum(0.9 * m, v[:, i].sum((1, 2)))",
                "b = b.select_scatter(m, 1, -1)",
                "z = v * b[:, :-1, None, None]",
            ),
            "torch.cat([z.flatten(1, 2), x[:, 3 * n :]], 1) * x * m.cos()[:, None, None]",
        ),
        ("states written from behind", (_buffer("d * n", "ones"), _FROM_BEHIND, _STATE, _BEFORE), _READ.format(states="b")),
        (
            "states that overlap",
            (
                _buffer("d * n + d", "ones"),
                _BUFFERS_LOOP,
                _STATE,
                "    b = b.slice_scatter(torch.cat([s, s[:, :1]], 1), 1, d * i, d * i + d + 1)",
            ),
            _READ.format(states="b[:, 1 : d * n + 1]"),
        ),
        (
            "states beside gaps",
            (_buffer("2 * d * n", "ones"), _BUFFERS_LOOP, _STATE, "    b = b.slice_scatter(s, 1, 2 * d * i, 2 * d * i + d)"),
            _READ.format(states="b.view(len(x), n, 2 * d, d)[:, :, 1 : d + 1]").replace(".view(len(x), n, d, d)", ""),
        ),
        (
            "states that are joined",
            ("b = []", _BUFFERS_LOOP, "    b.append(s)", _STATE, "z = torch.cat([*b, s], 1)"),
            _READ.format(states="z[:, :-d]") + " + s.sum(1, keepdim=True)",
        ),
        ("rows of two states", _STATES, _READ.format(states="b[:, 1 : d * n + 1]") + " + b[:, :1].cos()"),
    )
}


OF_ROWS = {**TABLES, **ORDERS, **LOOPS, **BUFFERS, **SQUARES, **COMPRESSED, **CUT_OUT}
