"""A term beside the loss, of the last x [b t d] and labels [b t]: look-ups, sums and identities that a cast may spoil."""

from __future__ import annotations

from tests.random_decoders.gradients import KNOWN_EARLY, RECOMPUTED, SEVERAL_HEADS
from tests.random_decoders.of_rows import OF_ROWS
from tests.random_decoders.picked import PICKED

EXTRAS: dict[str, tuple[str, ...]] = {
    "none": (),
    "one of each": ("term = x[torch.arange(b), (labels > 1).sum(1) % t].square().mean()",),
    "one of each by bool": ("term = x[torch.arange(b).bool().long(), (labels > 1).sum(1) % t].square().mean()",),
    "one of each by uint8": (
        "k = (torch.arange(b) + 254).to(torch.uint8).long() % b",
        "term = x[k, (labels > 1).sum(1) % t].square().mean()",
    ),
    "rows by bool": ("term = (x[:, 0][torch.arange(b).bool().long()] * torch.arange(b)[:, None]).square().mean()",),
    "repeated by bool": (
        "k = torch.arange(b).bool().long()[:, None].expand(b, 2).reshape(-1)",
        "term = (x[:, 0][k] * torch.arange(2 * b)[:, None]).square().mean()",
    ),
    "repeated": ("term = (x[:, 0][torch.arange(2 * b) // 2] * torch.arange(2 * b)[:, None]).square().mean()",),
    "added": ("term = torch.zeros_like(x[:, 0]).index_add(0, torch.arange(b).bool().long(), x[:, 0]).square().square().mean()",),
    "added as uint8": (
        "k = (torch.arange(b * t) * 9).to(torch.uint8).long() % (b * t)",
        "term = torch.zeros_like(x.flatten(0, 1)).index_add(0, k, x.flatten(0, 1)).square().mean()",
    ),
    "counted in int8": (
        "c = (labels * 60).to(torch.int8).sum(1, dtype=torch.int8)",
        "term = (x[..., 0].mean(1) * c).square().mean()",
    ),
    "counted from uint8": ("c = (labels + 250).to(torch.uint8).sum(1)", "term = (x[..., 0].mean(1) * c).square().mean()"),
    "running in int8": (
        "c = (labels * 60).to(torch.int8).cumsum(1, dtype=torch.int8)",
        "term = (x * c[..., None]).square().mean()",
    ),
    "running from int8": ("c = (labels * 60).to(torch.int8).cumsum(1)", "term = (x * c[..., None]).square().mean() * 1e-3"),
    "product of rows": (
        "c = (labels % 2 + 1).to(torch.uint8).prod(1, dtype=torch.uint8)",
        "term = (x[..., 0].mean(1) * c).square().mean()",
    ),
    "scattered": ("z = x.masked_scatter((labels == 1)[..., None].expand_as(x), x.detach() * 2)", "term = (z * x).mean()"),
    "scattered by integers": (
        "z = x.masked_scatter((labels % 3)[..., None].expand_as(x).bool(), x * 2)",
        "term = (z * x.detach()).mean()",
    ),
    "scattered by negatives": (
        "z = x.masked_scatter((-labels)[..., None].expand_as(x).bool(), x * 2)",
        "term = (z * x.detach()).mean()",
    ),
    "scattered by floats": (
        "z = x.masked_scatter((labels % 3 * 0.4)[..., None].expand_as(x).bool(), x * 2)",
        "term = (z * x.detach()).mean()",
    ),
    "odd softmax": ("term = Odd.apply(x[..., :-1] + x[..., -1:]).square().mean()",),
    "odd softmax of one": ("term = Odd.apply(x + self.shift).square().mean()",),
    "signs": ("y = -F.relu(x) + torch.zeros_like(x)", "term = (x * torch.copysign(torch.ones_like(x), y)).mean()"),
    "signs turned": ("y = torch.zeros_like(x) + -F.relu(x)", "term = (x * torch.signbit(y)).mean()"),
    "signs scattered": (
        "y = torch.zeros_like(x).scatter(-1, torch.zeros_like(x[..., :1], dtype=torch.int64), torch.full_like(x[..., :1], -0.0))",
        "term = (x * torch.copysign(torch.ones_like(x), y)).mean()",
    ),
    "heads repeated": (
        "q = torch.stack((x, x * 2, x * 3, x * 4), 1)",
        "k = Repeat.apply(torch.stack((x, x.sin()), 1))",
        "term = F.scaled_dot_product_attention(q, k, k, is_causal=True).square().mean()",
    ),
    "heads repeated oddly": (
        "q = torch.stack((x, x * 2, x * 3, x * 4), 1)",
        "k = Mixed.apply(torch.stack((x, x.sin()), 1))",
        "term = F.scaled_dot_product_attention(q, k, k, is_causal=True).square().mean()",
    ),
    "shifted maximum": (
        "s = (x @ x.transpose(1, 2)).masked_fill(at >= at[:, None], torch.finfo(x.dtype).min)",
        "term = ((s - s.amax(-1, keepdim=True)).softmax(-1) @ x).square().mean()",
    ),
}
# operators that count rows, where the number of a row is not its place in the sequence
PLACES: dict[str, tuple[str, ...]] = {
    "triangle of merged rows": ("term = x.flatten(0, 1).triu(-t).square().square().mean()",),
    "triangle of rows and heads": ("term = x.view(b, t * 2, -1).triu(-4).square().square().mean()",),
    "triangle of joined time": ("term = x.transpose(0, 1).flatten(0, 1).tril(-2).square().square().mean()",),
    "causal over merged rows": (
        "z = x.flatten(0, 1)[None, None]",
        "term = F.scaled_dot_product_attention(z, z, z, is_causal=True).square().square().mean()",
    ),
    "causal over joined time": (
        "z = x.transpose(0, 1).flatten(0, 1)[None, None]",
        "term = F.scaled_dot_product_attention(z, z, z, is_causal=True).square().square().mean()",
    ),
    "rows behind the end": (
        "z = F.pad(x[:, 2:], (0, 0, 0, 2))[:, None]",
        "term = F.scaled_dot_product_attention(z, z.sin(), z, is_causal=True).square().square().mean()",
    ),
    "rows swapped": (
        "z = torch.cat((x[:, t // 2 :], x[:, : t // 2]), 1)",
        "s = (z @ z.sin().transpose(1, 2)).masked_fill(at > at[:, None], -torch.inf)",
        "term = (s.softmax(-1) @ z).square().square().mean()",
    ),
    "further rows": (
        "z = torch.cat((x[:, :1], x, x[:, -2:]), 1)[:, None]",
        "term = F.scaled_dot_product_attention(z, z.sin(), z, is_causal=True).square().square().mean()",
    ),
    "causal over rows side by side": (
        "z = torch.stack((x, x / 2), 2).flatten(1, 2)[:, None]",
        "seen = (at <= at[:, None]).repeat_interleave(2, 1)",
        "term = F.scaled_dot_product_attention(x[:, None], z, z, attn_mask=seen).square().square().mean()",
    ),
    "product of later rows": ("term = (1 + torch.tanh(x[:, t // 2 :]) / 9).cumprod(1).square().square().mean()",),
    "sum of exponentials of later rows": ("term = x[:, t // 2 :].logcumsumexp(1).square().square().mean()",),
    "keys that begin later": (
        "z, k = x[:, None], x[:, None, t // 2 :]",
        "seen = at[t // 2 :] <= at[:, None]",
        "term = F.scaled_dot_product_attention(z, k.sin(), k, attn_mask=seen).square().square().mean()",
    ),
    "triangle of sorted rows": (
        "z = x.flatten(0, 1)",
        "order = z[:, 0].argsort(stable=True)",
        "z = z[order]",
        "z = ((z @ z.T).tril().tanh() @ z)[order.argsort()]",
        "term = (z * labels.flatten()[:, None]).square().mean()",
    ),
    "causal over sorted rows": (
        "order = labels.flatten().argsort(stable=True)",
        "z = x.flatten(0, 1)[order][None, None]",
        "z = F.scaled_dot_product_attention(z, z, z, is_causal=True)[0, 0][order.argsort()]",
        "term = (z * labels.flatten()[:, None]).square().mean()",
    ),
}
# rows counted from the end, or from a place in front of the first, by numbers that follow from a dynamic length
ENDS: dict[str, tuple[str, ...]] = {
    "second half": ("term = x[:, -(t // 2 + 1) :].mean(1).square().mean()",),
    "a row from the end": ("term = (x * x[:, -(t // 2) - 1 : t - t // 2]).square().mean()",),
    "more than there are": ("term = x[:, -9:-1].sum(1).square().mean()",),
    "from a sign that changes": ("term = x[:, t - 5 :].mean(1).square().mean()",),
    "moved from the end": ("term = (F.pad(x[:, -(t // 2 + 1) :], (0, 0, t - t // 2 - 1, 0)) * x).square().mean()",),
}
# numbers that follow from a dynamic length, and are no whole ones
NUMBERS: dict[str, tuple[str, ...]] = {
    "one by the length": ("term = (x.sum(1) * (1 / t)).square().mean()",),
    "root of the length": ("term = (x * (t / 2) ** -0.5).square().mean()",),
    "limit by the length": ("term = x.clamp(max=2 / t).square().mean()",),
    "filled by the length": ("term = (x.masked_fill(x > 0.5, 0.7 / t) + torch.full_like(x, 3 / t)).square().mean()",),
    "mixed by the length": ("term = torch.lerp(torch.add(x, x.sin(), alpha=1 / t), x.cos(), 2 / (t + 1)).square().mean()",),
    "power by the length": ("term = (x * x + 1).pow(1 / t).mean()",),
    "variance": ("term = x.var(1, correction=0).square().mean()",),
    "share of the rows": ("term = x[:, : int(t * 0.75) + 1].mean(1).square().mean()",),
    "less than nothing": ("term = (x * (3.5 - t)).square().mean() + (x * (7 - t)).square().mean()",),
}
_SHARES = "p = (x @ x.sin().transpose(1, 2)).masked_fill(at > at[:, None], -torch.inf).softmax(-1)"
# what is made of rows by keys along the rows, or as several results, or has to be there as a whole
PAIRS: dict[str, tuple[str, ...]] = {
    name: (_SHARES, f"term = ({made}).square().mean()")
    for name, made in {
        "mean over queries": "p.mean(1)",
        "mean over sequences and queries": "p.mean((0, 1))",
        "mean over keys": "(p * p).mean(2)",
        "mean over all": "(p * p).mean((0, 1, 2))",
        "sum over queries": "p.sum(1)",
        "variance over queries": "p.var(1, correction=0)",
        "norm over queries": "(p + 1).norm(dim=1)",
        "sorted over queries": "p.sort(1).values * (1 + at[:, None])",
        "largest so far over queries": "p.cummax(1).values * (1 + at)",
        "part of the queries": "p.split((t + 1) // 2, 1)[0]",
        "two statistics": "sum(torch.var_mean(p, (1, 2), correction=0))",
        "sums over earlier queries": "p.cumsum(1) * (1 + at)",
        "softmax over queries": "p.softmax(1) @ x",
    }.items()
}
_DISTANCE = "d = (at[:, None] - at).double()"
# what is made of positions over all keys, or all rows, of which a mask shows some afterwards
OVER_KEYS: dict[str, tuple[str, ...]] = {
    f"{name}, {shown}": (_DISTANCE, f"w = {made}", f"term = ({mask} @ x).square().mean()")
    for name, made in {
        "softmax": "(self.shift[0] * d.abs() / t).softmax(-1)",
        "softmax over queries": "(self.shift[0] * d.abs() / t).softmax(0)",
        "turned softmax": "(d * d / t).T.softmax(-1)",
        "share": "(lambda e: e / e.sum(-1, keepdim=True))(torch.exp(-d.abs()) * self.shift[0])",
        "share of many": "(lambda e: (e / e.sum(-1, keepdim=True))[7])(torch.exp(-d.abs()).expand(5000, t, t) * self.shift[0])",
        "running sum": "torch.exp(-d.abs()).cumsum(-1) / t",
        "running sum from the right": "torch.exp(-d.abs()).flip(-1).cumsum(-1).flip(-1) / t",
        "product": "torch.exp(-d.abs()) @ torch.cos(d) / t",
        "largest": "torch.sin(d * d) / (1 + torch.cos(d * d).amax(-1, keepdim=True))",
        "in order": "torch.sin(d * d).sort(-1)[0]",
        "centred": "d / t - (d.abs() / t).mean(-1, keepdim=True)",
    }.items()
    for shown, mask in {"earlier": "w.tril()", "near": "(w * ((d >= 0) & (d < 3)))"}.items()
}
_SCORES = "s = x @ (torch.sin(torch.arange({wide})[:, None] * torch.arange(1.0, x.shape[-1] + 1)).to(x) @ self.square).T"
# scores by distance that are shifted row by row, of which a mask shows some afterwards
SHIFTED: dict[str, tuple[str, ...]] = {
    f"{name}, {shown}": (
        _SCORES.format(wide=wide),
        f"s = ({padded}).view(b, -1, t)[:, 1:].reshape(b, t, -1)[..., :{columns}]",
        f"term = ({made}).square().mean()",
    )
    for name, wide, padded, columns in (
        ("both ways", "2 * t", "s", "t"),
        ("both ways behind zeros", "2 * t - 1", "F.pad(s, (1, 0))", "t"),
        ("to the left", "t", "F.pad(s, (1, 0))", "t"),
        ("to the left and one more", "t + 1", "F.pad(s, (1, 0))", "t"),
    )
    for shown, made in {
        "earlier": "s.masked_fill(at > at[:, None], -torch.inf).softmax(-1) @ x",
        "earlier and one more": "s.masked_fill(at > at[:, None] + 1, -torch.inf).softmax(-1) @ x",
        "near": "s.masked_fill((at > at[:, None]) | (at < at[:, None] - 2), -torch.inf).softmax(-1) @ x",
        "all": "s.softmax(-1) @ x",
        "a triangle": "s.tril() @ x",
        "later": "s.triu() @ x",
        "of queries": "s.tril().transpose(1, 2) @ x",
        "summed": "s.tril().sum(1) + s.sum(2)",
    }.items()
}
# parts of rows, one behind another as they stood, or otherwise
JOINED: dict[str, tuple[str, ...]] = {
    name: (f"z = torch.cat([{parts}], 1)", f"term = ({made}).square().mean()")
    for name, parts, made in (
        ("blocks in turn", "x[:, i : i + 3].cumsum(1) for i in range(0, t, 3)", "z * x"),
        ("blocks that attend", "(y @ y.mT).softmax(-1) @ y for y in x.split(4, 1)", "z * x.cos()"),
        ("halves swapped", "x[:, t // 2 :].sin(), x[:, : t // 2]", "z * x"),
        ("blocks backwards", "x[:, max(i - 3, 0) : i].sin() for i in range(t, 0, -3)", "z * x"),
        ("one block left out", "x[:, : t // 2].sin(), x[:, t // 2 + 1 :]", "z.cumsum(1)"),
        ("blocks that overlap", "x[:, : t // 2 + 1].sin(), x[:, t // 2 :]", "z.cumsum(1)"),
        ("a block twice", "x[:, : t // 2].sin(), x[:, : t - t // 2]", "z * x"),
        ("blocks of later rows", "x[:, t // 3 : t // 2].sin(), x[:, t // 2 :]", "z.cumsum(1)"),
        ("of two values", "x[:, : t // 2].sin(), x.cos()[:, t // 2 :]", "z @ z.mT"),
    )
}
LOOKED_UP: dict[str, tuple[str, ...]] = {  # what is zero where a key is hidden, and is a number of a row all the same
    name: ("n = ((labels[..., None] + labels[:, None]) % 2) * (at <= at[:, None])", f"term = ({made} * x).square().mean()")
    for name, made in {
        "rows of a table by pairs": "self.square[n].sum(2)",
        "rows of a table by pairs, embedded": "F.embedding(n, self.square).mean(2)",
        "rows of a table by pairs and shares": "(self.square[n] * (at <= at[:, None])[..., None]).sum(2)",
    }.items()
}
# how many rows each expert has, and by what rows are sorted
COUNTS = {
    "plain": "ends = torch.histc(group.float(), {n}, 0, {n} - 1).cumsum(0).to(torch.int32)",
    "ones": "ends = torch.zeros({n}, dtype=torch.int64).index_add(0, group, torch.ones_like(group)).cumsum(0).to(torch.int32)",
    "equals": "ends = (group[:, None] == torch.arange({n})).sum(0).cumsum(0).to(torch.int32)",
    **{
        f"counted as {kind}": f"ends = torch.histc(group.float(), {{n}}, 0, {{n}} - 1).to(torch.{kind}).cumsum(0).to(torch.int32)"
        for kind in ("int8", "uint8", "bool", "float16", "bfloat16")
    },
    **{
        f"summed as {kind}": f"ends = torch.histc(group.float(), {{n}}, 0, {{n}} - 1).cumsum(0).to(torch.{kind}).to(torch.int32)"
        for kind in ("int8", "uint8", "bfloat16")
    },
    "ones as int8": "ends = torch.zeros({n}, dtype=torch.int8).index_add(0, group, torch.ones_like(group, dtype=torch.int8))"
    ".cumsum(0).to(torch.int32)",
    "equals as int8": "ends = (group[:, None] == torch.arange({n})).sum(0, dtype=torch.int8).cumsum(0).to(torch.int32)",
    "of bools": "ends = torch.histc(group.bool().float(), {n}, 0, {n} - 1).cumsum(0).to(torch.int32)",
}
KEYS = {
    "plain": "group",
    "bool": "group.bool().long()",
    "int8 product": "(group.to(torch.int8) * 100)",
    "uint8": "(group * 100).to(torch.uint8)",
    "float16": "(group + 4096).half()",
    "remainder": "(group % 2)",
}
BYTES = {"as int8": ("group.to(torch.int8)", 128), "as uint8": ("group.to(torch.uint8)", 256)}  # and as many experts
APART: dict[str, tuple[str, ...]] = {  # gradients that are equal, or the tangent itself
    "two shifts": ("term = (x + self.one + self.two).square().mean()",),
    "two shifts in turn": ("y = x + self.one", "term = (y.sin() + y + self.two - self.one).square().mean()"),
    "two views": (
        "one, two = self.one.view(2, -1), self.two.view(-1, 2)",
        "term = (x + one.flatten() + two.flatten()).square().mean()",
    ),
    "two products": ("term = (F.linear(x, self.square) + F.linear(x, self.another)).square().mean()",),
    "two biases": ("term = (F.linear(x, self.square, self.one) + F.linear(x, self.another, self.two)).square().mean()",),
    "two halves": ("term = (x * torch.cat((self.one[: x.shape[-1] // 2], self.two[x.shape[-1] // 2 :]))).square().mean()",),
    "two that are turned": ("term = (x @ self.square + x @ self.another.t()).square().mean()",),
    "two sums": ("term = (self.one + self.two).sum() * x.mean()",),
    "two sums alone": ("term = x.square().mean() + (self.one + self.two).sum()",),
    "two scalars": ("term = x.square().mean() + self.one.sum() + self.two.mean()",),
}
ASSERTED: dict[str, tuple[str, ...]] = {
    name: (f"torch._assert_async({what}, 'asserted')", "term = x.square().mean()")
    for name, what in {
        "labels asserted": "(labels > -200).all()",
        "labels counted": "(labels > -200).sum() == labels.numel()",
        "activations asserted": "(x.square().sum(-1).nan_to_num(0, 0, 0) < 1e12).all()",
        "weights asserted": "self.one.isfinite().all()",
        "the loss asserted": "loss.detach().nan_to_num(0, 0, 0) < 1e300",
    }.items()
}
FEW: dict[str, tuple[str, ...]] = {  # chunks of one row, or of none, and what depends on how many there are
    "squeezed": ("term = ((x @ self.one[:, None]).squeeze() * x[..., 0] * self.two.sum()).mean()",),
    "squeezed rows": ("z = x[:, t // 2 :].squeeze()", "term = (z * self.one).square().mean()"),
    "squeezed at rows": ("term = (x.squeeze(1) * x * self.one).square().mean()",),
    "squeezed at both": ("term = (torch.squeeze(x, (0, 1)) * self.one + x).square().mean()",),
    "squeezed shares": (_SHARES, "term = (p[:, None].squeeze()[:, None] * self.one.sum()).square().mean()"),
    "one tap, padded": (
        "z = F.conv1d(x.transpose(1, 2), self.square[..., None], padding=1)",
        "term = (z * self.one[:, None]).square().mean()",
    ),
    "one tap, cut": (
        "z = F.conv_transpose1d(F.pad(x, (0, 0, 1, 1)).transpose(1, 2), self.square[..., None], padding=1)",
        "term = (z * self.one[:, None]).square().mean()",
    ),
    "one tap, cut to less": (
        "z = F.conv_transpose1d(torch.cat((x, x, x), 1).transpose(1, 2), self.square[..., None], padding=1)",
        "term = z.sum() * 1e-2",
    ),
    "one tap of some": ("term = F.conv1d(x[:, t // 2 :].transpose(1, 2), self.square[..., None]).square().mean()",),
    "products behind nothing": (
        "z = torch.cat((torch.zeros_like(labels[:, :1]), labels % 2 + 1), 1).double().mul(1e120).cumprod(1)",
        "term = (x * z[:, 1:, None] + x).square().mean()",
    ),
    "joined positions": (
        "n = torch.arange(t)",
        "n, z = torch.cat((n, n)), torch.cat((x, x.sin()), 1)",
        "s = (z @ z.cos().transpose(1, 2)).masked_fill(n > n[:, None], -torch.inf)",
        "term = (s.softmax(-1) @ z).square().mean()",
    ),
}
_ONES = "ones = (x.detach() > -1e9).half()"
HALVES: dict[str, tuple[str, ...]] = {  # sums that float32 holds exactly, of parts that float16 does not
    "sum of signs": (
        _ONES,
        "c = (ones * 40000 * torch.where(at < t // 2, 1.0, -1.0)[:, None].half()).sum(1)",
        "term = (x.mean(1) * c.double() * 1e-4).square().mean()",
    ),
    "mean of many": (_ONES, "c = (ones * 20480).mean((0, 1))", "term = (x * c.double() * 1e-4).square().mean()"),
    "mean beside rows": (
        _ONES,
        "c = ones * (labels % 2 + 1)[..., None].half() * 20480",
        "term = (x * (c - c.mean(1, keepdim=True)).double() * 1e-4).square().mean()",
    ),
}
FEATURES: dict[
    str, tuple[int, str]
] = {  # how many parts of the width an input has, and what is made of it before the first layer
    "joined": (2, "torch.cat((feats, torch.zeros_like(feats)), -1)"),
    "joined behind": (2, "torch.cat((torch.zeros_like(feats), feats), -1)"),
    "padded": (2, "F.pad(feats, (0, feats.shape[-1]))"),
    "stacked": (2, "torch.stack((feats, feats.sin()), -1).flatten(-2)"),
    "written": (2, "torch.zeros_like(x).slice_scatter(feats, -1, 1, 1 + feats.shape[-1])"),
    "complex": (2, "torch.view_as_real(torch.complex(feats, feats.cos())).flatten(-2)"),
    "turned by a number": (2, "torch.view_as_real(torch.complex(feats, feats.cos()) * (1 - 2j)).flatten(-2)"),
    "conjugate": (2, "torch.view_as_real(torch.polar(feats, feats.cos()).conj().resolve_conj()).flatten(-2)"),
    "parts of a conjugate": (2, "torch.cat(((z := torch.polar(feats, feats.cos()).conj()).imag, z.real), -1)"),
    "twice": (1, "feats"),
    "turned": (1, "feats.flip(-1)"),
}
PARAMETERS = {"shift": 0, "one": 1, "two": 1, "square": 2, "another": 2}  # by name: how many dimensions of the width
LINES = {
    **EXTRAS,
    **APART,
    **ASSERTED,
    **PLACES,
    **ENDS,
    **PAIRS,
    **OVER_KEYS,
    **LOOKED_UP,
    **PICKED,
    **SHIFTED,
    **JOINED,
    **OF_ROWS,
    **KNOWN_EARLY,
    **NUMBERS,
    **FEW,
    **HALVES,
    **RECOMPUTED,
    **SEVERAL_HEADS,
}
