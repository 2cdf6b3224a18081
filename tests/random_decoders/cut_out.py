"""Terms of blocks of three rows that a loop cuts out of the sequence, works on one by one, and joins; the last may be shorter."""

from __future__ import annotations

_STARTED = ("d, o, m = x.shape[-1], [], x.new_zeros(len(x))", "s = x.new_zeros(len(x), d, d)")
_LOOP, _SPLIT = "for i in range(0, t, 3):", "for i, y in enumerate(x.split(3, 1)):"
_TWO = "for y, z in zip(x.split(3, 1), x.cos().split(3, 1), strict=True):"
_BLOCK, _NEXT = "    y = x[:, i : i + 3]", "    s = 0.5 * s.sin() + y.mT @ y.cos()"
_MADE = "    o.append(y @ s + (y @ y.mT).tril() @ y.sin())"
_JOINED = "torch.cat(o, 1) * x"


def _loop(*lines: str, loop: str = _LOOP) -> tuple[str, ...]:
    return (loop, *((_BLOCK,) if loop is _LOOP else ()), *lines)


CUT_OUT: dict[str, tuple[str, ...]] = {
    name: (*_STARTED, *lines, f"term = ({used}).square().mean()")
    for name, lines, used in (
        ("states of blocks cut out", _loop(_MADE, _NEXT), _JOINED),
        ("states of blocks split", _loop(_MADE, _NEXT, loop=_SPLIT), _JOINED),
        ("blocks cut out alone", _loop("    o.append((y @ y.mT).tril() @ y.sin())"), _JOINED),
        ("blocks split alone", _loop("    o.append(y.softmax(1) * y.cumsum(1))", loop=_SPLIT), _JOINED),
        ("states and the last one", _loop(_MADE, _NEXT), f"{_JOINED} + s.sum(1, keepdim=True)"),
        ("states behind blocks cut out", _loop(_NEXT, "    o.append(y @ s)"), _JOINED),
        ("the block before", _loop("    o.append(y * x[:, max(i - 3, 0) : i + 3].cos().mean(1, keepdim=True))"), _JOINED),
        ("the block behind", _loop("    o.append(y * x[:, i : i + 6].cos().mean(1, keepdim=True))"), _JOINED),
        ("all blocks so far", _loop("    o.append(y * x[:, : i + 3].cos().mean(1, keepdim=True))"), _JOINED),
        ("the first block", _loop(_MADE, "    s = 0.5 * s.sin() + y.mT @ y.cos() + x[:, :3].sum(1, keepdim=True)"), _JOINED),
        ("a step of its own", _loop(_MADE, _NEXT, "    s = s * 0.5 if i == 3 else s"), _JOINED),
        ("a step left out", _loop(_MADE, "    s = s if i == 6 else 0.5 * s.sin() + y.mT @ y.cos()"), _JOINED),
        ("a step cut off", _loop(_MADE, _NEXT, "    s = s.detach() if i == 3 else s"), _JOINED),
        ("blocks joined from the last", _loop(_MADE, _NEXT), "torch.cat(o[::-1], 1).sum(1)"),
        ("a row in front", _loop(_MADE, _NEXT), "torch.cat([x[:, :1], *o], 1)[:, :-1] * x"),
        ("parts of blocks", _loop("    o.append((y @ s)[:, :2])", _NEXT), "torch.cat(o, 1).sum(1)"),
        ("the last rows of blocks", _loop("    o.append(y[:, -1:] @ s)", _NEXT), "torch.cat(o, 1).cumsum(1).sum(1)"),
        (
            "states of every other block",
            _loop("    s = 0.5 * s.sin() + y.mT @ y.cos() if i % 2 else s", "    o.append(y @ s)"),
            _JOINED,
        ),
        (
            "two loops on the same blocks",
            (*_loop(_MADE, _NEXT), "p, r = [], s", *_loop("    p.append(y @ r)", "    r = 0.5 * r.cos() + y.mT @ y")),
            f"torch.cat(p, 1) * {_JOINED}",
        ),
        (
            "blocks from the last to the first",
            (
                "for i in reversed(range(0, t, 3)):",
                _BLOCK,
                "    o.append(y @ s)",
                "    s = 0.5 * s.sin() + y.mT @ y.cos()",
            ),
            "torch.cat(o[::-1], 1) * x",
        ),
        (
            "numbers from block to block",
            _loop("    m = torch.maximum(0.9 * m, y.sum((1, 2)))", "    o.append(y * m[:, None, None])"),
            _JOINED,
        ),
        (
            "a last block nobody reads",
            (_TWO, "    o.append(y @ s)", "    s = 0.5 * s.sin() + z.mT @ z"),
            _JOINED,
        ),
        (
            "a first block nobody reads",
            (_TWO, "    o.append(z if not o else z + y @ s)", "    s = 0.5 * s.sin() + z.mT @ z"),
            _JOINED,
        ),
        ("single rows cut out", ("for i in range(t):", "    y = x[:, i : i + 1]", _MADE, _NEXT), _JOINED),
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
