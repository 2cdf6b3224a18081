"""A term beside the loss, of the last x [b t d] and labels [b t], of which the program itself asks that parts are recomputed."""

from __future__ import annotations

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
