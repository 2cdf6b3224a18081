"""What stands between the last layer and the loss, and whether rows of it can be made alone: with the sequence mixed, or not.

Each is an expression of `x`; `{over}` is an index that lays numbers of rows along the sequence, `{time}` its dimension.
"""

from __future__ import annotations

from tests.random_decoders.layouts import Layout

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


def mixed(name: str, layout: Layout, value: str) -> str:
    """The line that mixes `value`."""
    over = {(0, True): "[:, None, None]", (0, False): "[:, None]"}.get((layout.time, "," in layout.sizes), "[:, None]")
    parts = {"over": over, "time": layout.time, "last": layout.cut("x", "-1:"), "first": layout.cut("x", ":1")}
    line = MIXES[name].format(**parts)
    return f"{value} = (lambda x: {line})({value})" if value != "x" else f"x = {line}"
