"""What a gradient becomes on its way: linear maps and some that are not, as expressions of g."""

from __future__ import annotations

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
