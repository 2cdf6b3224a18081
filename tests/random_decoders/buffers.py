"""Terms of states that a loop over blocks of three rows writes into a buffer, `d` rows for each, and that are read by slice."""

from __future__ import annotations

_STARTED = (
    "n, d = t // 3, x.shape[-1]",
    "y = x[:, : 3 * n].contiguous()",
    "v, s, m = y.view(len(x), n, 3, d), x.new_zeros(len(x), d, d), x.new_zeros(len(x))",
)
_STATE = "    s = 0.5 * s.sin() + y[:, 3 * i : 3 * i + 3].mT @ v[:, i].cos()"
_BEFORE = "    b = b.slice_scatter(s, 1, d * i, d * i + d)"
_BEHIND = "    b = b.slice_scatter(s, 1, d * i + d, d * i + 2 * d)"
_LAST = "b = b.slice_scatter(s, 1, d * n, d * n + d)"
_READ = "torch.cat([(v @ {states}.view(len(x), n, d, d)).flatten(1, 2), x[:, 3 * n :]], 1) * x"
_LOOP, _FROM_BEHIND = "for i in range(n):", "for i in reversed(range(n)):"


def _buffer(rows: str, fill: str = "zeros") -> str:
    return f"b = x.new_{fill}(len(x), {rows}, d)"


_STATES = (_buffer("d * n + d"), _LOOP, _BEFORE, _STATE, _LAST)
BUFFERS: dict[str, tuple[str, ...]] = {
    name: (*_STARTED, *lines, f"term = ({used}).square().mean()")
    for name, lines, used in (
        ("states in front of blocks", _STATES, _READ.format(states="b[:, :-d]")),
        ("states behind blocks", (_buffer("d * n", "ones"), _LOOP, _STATE, _BEFORE), _READ.format(states="b")),
        (
            "a first state that nobody writes",
            (_buffer("d * n + d", "ones"), _LOOP, _STATE, _BEHIND),
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
                _LOOP,
                "    b = b.select_scatter(m, 1, i)",
                "    m = torch.maximum(0.9 * m, v[:, i].sum((1, 2)))",
                "b = b.select_scatter(m, 1, -1)",
                "z = v * b[:, :-1, None, None]",
            ),
            "torch.cat([z.flatten(1, 2), x[:, 3 * n :]], 1) * x * m.cos()[:, None, None]",
        ),
        (
            "states written from behind",
            (_buffer("d * n", "ones"), _FROM_BEHIND, _STATE, _BEFORE),
            _READ.format(states="b"),
        ),
        (
            "states that overlap",
            (
                _buffer("d * n + d", "ones"),
                _LOOP,
                _STATE,
                "    b = b.slice_scatter(torch.cat([s, s[:, :1]], 1), 1, d * i, d * i + d + 1)",
            ),
            _READ.format(states="b[:, 1 : d * n + 1]"),
        ),
        (
            "states beside gaps",
            (_buffer("2 * d * n", "ones"), _LOOP, _STATE, "    b = b.slice_scatter(s, 1, 2 * d * i, 2 * d * i + d)"),
            _READ.format(states="b.view(len(x), n, 2 * d, d)[:, :, 1 : d + 1]").replace(".view(len(x), n, d, d)", ""),
        ),
        (
            "states that are joined",
            ("b = []", _LOOP, "    b.append(s)", _STATE, "z = torch.cat([*b, s], 1)"),
            _READ.format(states="z[:, :-d]") + " + s.sum(1, keepdim=True)",
        ),
        ("rows of two states", _STATES, _READ.format(states="b[:, 1 : d * n + 1]") + " + b[:, :1].cos()"),
    )
}
