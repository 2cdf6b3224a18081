"""Terms of blocks of rows that loops cut out, beside all blocks at once."""

from __future__ import annotations

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
