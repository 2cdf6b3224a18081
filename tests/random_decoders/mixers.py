"""Mixers along the sequence that kinds of decoders draw, by name: an expression of z or of rows r, or more parts of a program."""

from __future__ import annotations

WHOLE = {  # what runs whole in front of the loops of an attention, or behind those that make its rows
    "sorted": "z = z + z.sort({time}).values",
    "turned": "z = z + 0.3 * torch.fft.fft(z, dim={time}).real",
    "ranked": "z = z * z.argsort({time}).to(z.dtype) / t",
    "dealt": "z = z.gather({time}, z[..., :1].argsort({time}).expand_as(z))",
    "middle": "z = z - z.median({time}, keepdim=True).values",
    "counted": "z = z + z.sort({time}).values.cumsum({time}) / t",
}
SCANS = {  # PyTorch's own loop over rows: a step's next state, what a row of the result is, and which way it goes
    "decayed": "lambda s, r: (0.5 * s + r.sigmoid(), s * r), {first}, z, dim={time}",
    "saturated": "lambda s, r: (0.9 * torch.tanh(s * r) + r, s.cos() - r), {first}, z, dim={time}",
    "chosen": "lambda s, r: (torch.where(r > 0, 0.9 * s, 0.5 * s) + r, s.sin()), {first}, z, dim={time}",
    "of sums": "lambda s, r: (0.5 * s + r - r.sum(-1, keepdim=True).sin(), s * s.sum(-1, keepdim=True)), {first}, z, dim={time}",
    "of two": "lambda s, r: ((0.5 * s[0] + r[1], 0.9 * s[1] + r[0]), s[0] * s[1]), ({first}, {first}), (z, z.tanh()), dim={time}",
    "weighted": "lambda s, r: (0.5 * s + s @ mixed.t().sigmoid() + r, s * mixed.sum(0)), {first}, z, dim={time}",
    "reset": "lambda s, r: ((0.9 * s + r) * (r.sum(-1, keepdim=True) > 0), s.sin() + r), {first}, z, dim={time}",
    "from the end": "lambda s, r: (0.5 * s + r.sigmoid(), s * r), {first}, z, dim={time}, reverse=True",
}
AFFINE = "lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])"
TREES = {  # PyTorch's associative scan: how two rows are combined, what the rows are, and what is made of the results
    "affine": (AFFINE, "(z.sigmoid(), z)", "y[1]"),
    "both leaves": ("lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1].sin())", "(z.cos(), z)", "y[0] * y[1] + z"),
    "largest": ("torch.maximum", "z.round(decimals=1)", "y + z"),
    "exponents": ("torch.logaddexp", "z", "y"),
    "in this order": ("lambda a, b: (0.5 * a - b).sin()", "z", "y"),
    "of weights": ("lambda a, b: (a @ mixed.t()).tanh() + b * mixed.sum(0)", "z", "y"),
    "of documents": (AFFINE, "((z.sum(-1, keepdim=True) > 0) * z.sigmoid(), z)", "y[1] + torch.copysign({sign}, y[0])"),
    "of widths": (
        "lambda a, b: (torch.maximum(a[0], b[0]), (a[0] - b[0]).exp().clamp(max=1) * a[1] + b[1])",
        "(z[..., :1], z.tanh())",
        "y[1] / (1 + y[0] * y[0])",
    ),
    "after whole numbers": (  # by the same function, which hands their leaf no gradient
        AFFINE,
        "((z.detach() > 0).long(), z)",
        f"associative_scan({AFFINE}, (z.cos(), y[1]), {{time}}, combine_mode='generic')[1]",
    ),
    "from behind": (AFFINE, "(z.sigmoid(), z)", "y[1]"),
}
STATEFUL = {  # operators with a state: y and the last state of rows r [b t d], the first one's shape, and what is for all rows
    "selective": (
        "selective(r, r.sigmoid(), -mixed.sigmoid(), r @ mixed, r @ mixed.cos(), None, {first})",
        "({d}, {d})",
        "last.sum(-1)",
    ),
    "blocks": (
        "blocks(*(f(r)[:, :, None] for f in (torch.sin, torch.tanh, torch.cos)), -r[..., :1].exp(), 0.5, {first}, {asks})[:2]",
        "(1, {d}, {d})",
        "last.sum((1, -1))",
    ),
    "windows": ("windows(r.contiguous().mT, mixed[:, :3], None, {first})", "({d}, 2)", "last.sum(-1)"),
    "averages": ("averages(r.shape[1], r.tanh(), r, mixed[0].sigmoid(), {first}, {first})[:2]", "({d},)", "last"),
}
DECAYS = ("decays of rows", "decays of blocks")
# what stands between the last layer and the loss, and whether rows of it can be made alone: with the sequence mixed, or not; each
# is an expression of `x`; `{over}` is an index that lays numbers of rows along the sequence, `{time}` its dimension
MIXES: dict[str, str] = {
    "own mean": "x - x.mean(-1, keepdim=True)",
    "own scale": "x * (x.square().mean(-1, keepdim=True) + 1e-2).rsqrt()",
    "own shares": "x.softmax(-1) * x",
    "by position": "x * (1 + at{over}).sqrt()",
    "mean over time": "x - x.mean({time}, keepdim=True)",
    "mean over sequences and time": "x - x.mean(tuple(range(x.dim() - 1)))",
    "mean of all": "x - x.exp().mean()",
    "mean over no dimension": "x - x.cos().mean(())",
    "scale of all but time": "x * x.square().mean([dim for dim in range(x.dim()) if dim != {time}], keepdim=True).sqrt()",
    "scale over time": "x / (1 + x.std({time}, keepdim=True, unbiased=False))",
    "shares of time": "x.softmax({time}) * t",
    "sum so far": "x.cumsum({time}) / 3",
    "largest so far": "x.cummax({time}).values",
    "largest of time": "x - x.amax({time}, keepdim=True)",
    "last row": "x * {last}.cos()",
    "first row": "x + {first}.sin()",
    "turned": "x + x.flip({time})",
    "rolled": "x * 2 + x.roll(1, {time})",
    "batch statistics": "F.batch_norm(x.reshape(-1, x.shape[-1]), None, None, training=True).view_as(x)",
    "norm of two dimensions": "F.layer_norm(x, x.shape[-2:])",
    "norm, scaled by rows": "F.layer_norm(x, x.shape[-1:], x.cos().reshape(-1, x.shape[-1]).mean(0))",
    "times its own weight": "x + x @ (x.reshape(-1, x.shape[-1]).mT @ x.reshape(-1, x.shape[-1]) / x.numel())",
    "linear of itself": "x + F.linear(x, torch.eye(x.shape[-1], dtype=x.dtype) * x.tanh().mean())",
    "transposed": "x + (x.mT - x.mT.mean(-1, keepdim=True)).mT.sin()",
    "square": "x * x.mean(-1).unsqueeze(-2) if x.shape[-2] == x.shape[-1] else x",
    "square of rows": "x * x.mean(-1).mT.unsqueeze(-1) if x.dim() == 3 and x.shape[0] == x.shape[1] else x",
    "merged": "(x.reshape(-1, x.shape[-1]) - 0.5 * x.reshape(-1, x.shape[-1])[:1]).view_as(x)",
}
