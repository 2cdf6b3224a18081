"""Terms of rows that see blocks of rows, each made one: by themselves, or joined with the rows; hidden until they end, or not."""

from __future__ import annotations

from itertools import product

_WHOLE = "y, n = x[:, : t - t % 3], t // 3"
_VIEW = "v = y.unflatten(1, (-1, 3)) if n else x[:, :, None]"
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
    f"{made}, {used}": (_WHOLE, _VIEW, *_MADE[made], _DONE, _ROWS, *_USED[used], "term = z.square().square().mean()")
    for made, used in product(_MADE, _USED)
}
