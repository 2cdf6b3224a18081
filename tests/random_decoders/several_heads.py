"""A term beside the loss, of the last x [b t d] and labels [b t]: several heads, with attention between what they are given."""

from __future__ import annotations

_WIDE = "wide = torch.cat([self.square, self.square.sin(), self.square.cos()], 1)"
_HEAD = "head = lambda y: F.cross_entropy((y @ wide).flatten(0, 1), (labels[:, -y.shape[1]:] % 2).flatten())"
_ATTENTION = "attention = lambda y: F.scaled_dot_product_attention(y, y, y @ self.square, is_causal=True)"
_SEGMENTS = (
    "first = attention(torch.cat([x[:, :1], x[:, : t // 2 + 1], x[:, :1]], 1))",
    "second = attention(torch.cat([first[:, -1:], x[:, t // 2 :], first[:, -1:]], 1))",
)

SEVERAL_HEADS: dict[str, tuple[str, ...]] = {
    "several heads of two calls": (_WIDE, _HEAD, _ATTENTION, "term = head(x) + 2 * head(attention(x))"),
    "several heads of three calls": (
        _WIDE,
        _HEAD,
        _ATTENTION,
        "z = attention(x)",
        "term = head(x) * head(z) + head(attention(z))",
    ),
    "several heads of calls in turn": (
        *(_WIDE, _HEAD, _ATTENTION, "made = head(x)", "z = attention(x * made.sigmoid())"),
        "term = made + head(z) + head(attention(z).tanh())",
    ),
    "several heads of segments": (_WIDE, _HEAD, _ATTENTION, *_SEGMENTS, "term = head(first[:, 1:-1]) + head(second[:, 1:-1])"),
    "several heads of rows": (
        *(_WIDE, _ATTENTION, "head = lambda y: (y @ wide).logsumexp(-1)", "z = attention(x)"),
        "term = (head(x) * head(z)).mean() + head(attention(z)).mean()",
    ),
}
