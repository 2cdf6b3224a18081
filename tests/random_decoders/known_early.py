"""Gradients of their own that take one row, or a sum of rows, of what was given: known before any gradient is."""

from __future__ import annotations

from tests.random_decoders.functions import FUNCTION

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
