"""Functions with gradients of their own, which terms of decoders call."""

from __future__ import annotations

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
