"""Terms of blocks with as many rows as a row has numbers, or of as many blocks as one has rows: no size says what is what."""

from __future__ import annotations

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
