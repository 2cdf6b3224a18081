"""What a gradient becomes on its way, and functions with gradients of their own, which terms of decoders call."""

from __future__ import annotations

# linear maps and some that are not, as expressions of g
BENDS = {
    "none": "g",
    "twice": "g * 2",
    "plus": "g + 1e-3",
    "minus": "g - 1e-3",
    "turned": "1e-3 - g",
    "plus alpha": "torch.add(g, 1, alpha=1e-3)",
    "plus number": "g + torch.tensor(1e-3, dtype=g.dtype)",
    "padded": "F.pad(g, (0, 1), value=1e-3)[..., 1:]",
    "padded in front": "F.pad(g, (1, 0), value=1e-3)[..., :-1]",
    "joined": "torch.cat((g[..., 1:], torch.full_like(g[..., :1], 1e-3)), -1)",
    "joined rows": "torch.cat((torch.full_like(g[:1], 1e-3), g[1:]), 0)",
    "written": "torch.slice_scatter(torch.full_like(g, 1e-3), g[..., 1:], -1, 1)",
    "filled": "g.masked_fill(torch.arange(g.shape[-1]) == 1, 1e-3)",
    "chosen": "torch.where(g > 0, g, 1e-3)",
    "clamped": "g.clamp(-1e-3, 1e-3)",
    "normed": "g / (g.norm() + 1)",
    "square": "g * g",
    "sign": "g.sign()",
    "rounded": "g.round(decimals=4)",
    "float8": "g.to(torch.float8_e4m3fn).to(g.dtype)",
    "float16": "(g * 1e-4).half().to(g.dtype) * 1e4",
    "integers": "(g * 10000).to(torch.int32).to(g.dtype) / 10000",
    "integer sums": "g * 0 + (g * 1000).sum(-1, keepdim=True, dtype=torch.int64).to(g.dtype)",
    "sums": "g + g.sum(-1, keepdim=True)",
    "biased product": "torch.addmm(torch.full((g.shape[-1],), 1e-3, dtype=g.dtype), g.reshape(-1, g.shape[-1]), "
    "torch.eye(g.shape[-1], dtype=g.dtype)).view(g.shape)",
    "between": "torch.lerp(g, torch.ones_like(g), 1e-3)",
}
BEND = """
class Bend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return {gradient}


"""
FUNCTION = """
class {name}(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        {forward}

    @staticmethod
    def backward(ctx, g):
        {backward}


"""
_REPEATED = "return x[:, :, None].expand(*x.shape[:2], 2, *x.shape[2:]).reshape(x.shape[0], 4, *x.shape[2:])"
FUNCTIONS = {
    "Odd": FUNCTION.format(
        name="Odd",
        forward="y = torch.tanh(x)\n        ctx.save_for_backward(y)\n        return y",
        backward="return torch._softmax_backward_data(g, ctx.saved_tensors[0], -1, g.dtype)",
    ),
    "Repeat": FUNCTION.format(
        name="Repeat", forward=_REPEATED, backward="return g.reshape(g.shape[0], 2, 2, *g.shape[2:]).sum(2)"
    ),
    "Mixed": FUNCTION.format(
        name="Mixed",
        forward=_REPEATED,
        backward="return g.reshape(g.shape[0], 1, 4, *g.shape[2:]).sum(2).expand(g.shape[0], 2, *g.shape[2:])",
    ),
}

# -- gradients of their own that take one row, or a sum of rows, of what was given: known before any gradient is

_OF_ROWS = {
    "a sum": "x.sin().sum(1, keepdim=True)",
    "the first row": "x[:, :1].cos()",
    "the last row": "x[:, -1:].cos()",
    "a row twice": "x[:, :1].cos() + x[:, :1].sum(-1, keepdim=True)",
    "a sum of a running sum": "x.cumsum(1).sin().sum(1, keepdim=True)",
    "a sum of one that runs back": "(x.flip(1).cumsum(1).flip(1).sin() * x).sum(1, keepdim=True)",
    "a sum of rows in front": "x.roll(1, 1).cos().sum(1, keepdim=True)",
    "a sum of what a sum is in": "(x - x.mean(1, keepdim=True)).square().sum(1, keepdim=True)",
    "how many": "(x > x[:, :1]).sum(1, keepdim=True).to(g.dtype)",
    "the largest": "x.amax(1, keepdim=True)",
    "a table": "x.new_zeros(5, x.shape[-1]).index_add(0, (x[..., 0].flatten() * 9).abs().long() % 5, x.flatten(0, 1)).mean(0)",
    "a product": "(x.flatten(0, 1).T @ x.flatten(0, 1)).sin().mean(0)",
    "a sum over pairs": "(x @ x.mT).softmax(-1).sum(1)[..., None]",
}
_NAMES = {what: f"Known{number}" for number, what in enumerate(_OF_ROWS)}
KNOWN = {
    _NAMES[what]: FUNCTION.format(
        name=_NAMES[what],
        forward="ctx.save_for_backward(x)\n        return x * 1.5",
        backward=f"(x,) = ctx.saved_tensors\n        return g * ({made})",
    )
    for what, made in _OF_ROWS.items()
}
KNOWN_EARLY: dict[str, tuple[str, ...]] = {
    f"{what} in a gradient{'' if times == 1 else ', twice'}": (
        f"y = {name}.apply(x.sin())",
        f"term = ({'y' if times == 1 else f'{name}.apply(y.cos()) * y'}).square().mean()",
    )
    for what, name in _NAMES.items()
    for times in (1, 2)
}


# -- a term beside the loss, of the last x [b t d] and labels [b t], of which the program itself asks that parts are recomputed

_CALL = "term = checkpoint({function}, x, use_reentrant=False)"
_POLICY = "context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])"
_MANY = "term = sum(checkpoint(lambda y, c=c: ({made}).mean(), x * c, use_reentrant=False) for c in (1.0, 0.5, 0.25))"

RECOMPUTED: dict[str, tuple[str, ...]] = {
    "a product": (_CALL.format(function="lambda y: F.gelu(y @ self.square).square().mean()"),),
    "rows": ("z = checkpoint(lambda y: torch.tanh(y @ self.square), x, use_reentrant=False)", "term = (z * x).mean()"),
    "attention": (
        "z = checkpoint(lambda y: F.scaled_dot_product_attention(y, y.sin(), y @ self.square, is_causal=True), x[:, None],"
        " use_reentrant=False)",
        "term = z.square().square().mean()",
    ),
    "one in another": (
        "inner = lambda y: torch.tanh(y @ self.square)",
        "outer = lambda y: checkpoint(inner, checkpoint(inner, y, use_reentrant=False) + y, use_reentrant=False)",
        "term = checkpoint(outer, x, use_reentrant=False).square().mean()",
    ),
    "products of features": (_MANY.format(made="(y @ self.square).cos().prod(-1)"),),
    "masks of products": (_MANY.format(made="(y @ self.square).clamp(-0.5, 0.5)"),),
    "largest of products": (_MANY.format(made="(y @ self.square).amax(-1)"),),
    "running sums of products": (_MANY.format(made="(y @ self.square).cumsum(1).sin()"),),
    "sums over rows": (_MANY.format(made="(y @ self.square).sin().sum(1).square()"),),
    "products that are kept": (
        f"z = checkpoint(lambda y: torch.tanh((y @ self.square) @ self.square.t()), x, use_reentrant=False, {_POLICY})",
        "term = (z * x).mean()",
    ),
    "written in place": (
        "z = checkpoint(lambda y: (y @ self.square).mul_(2).tanh_(), x, use_reentrant=False)",
        "term = (z * x).square().mean()",
    ),
}


# -- a term beside the loss, of the last x [b t d] and labels [b t]: several heads, with attention between what they are given

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
    "several heads of segments": (
        _WIDE,
        _HEAD,
        _ATTENTION,
        *_SEGMENTS,
        "term = head(first[:, 1:-1]) + head(second[:, 1:-1])",
    ),
    "several heads of rows": (
        *(_WIDE, _ATTENTION, "head = lambda y: (y @ wide).logsumexp(-1)", "z = attention(x)"),
        "term = (head(x) * head(z)).mean() + head(attention(z)).mean()",
    ),
}
