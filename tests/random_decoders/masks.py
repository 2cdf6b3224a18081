"""Masks by programs of index arithmetic: what numbers positions are, how two of them are compared, and how that becomes a mask.

A row of each table is an ingredient, and the first row the simplest. Most rows are here because some argument or some type makes
an operator do something else than it usually does: `sub` with an alpha, numbers that wrap, distances that round.

What is done to scores beside the mask of positions: keys hidden by data, by activations, by tables of tokens, by the diagonal.

A row is an expression of the scores {s}; {gate} is a number per key made from activations, {keep} which keys are there, {number}
what is looked up for each token, {eye} the diagonal. Whatever stands for minus infinity here may meet a fill that is larger.
What is compared for the largest has no ties between equal tokens: rounding would decide them.
"""

from __future__ import annotations

BENT = {
    "none": "{s}",
    "kept": "{s}.masked_fill(~{keep}, -torch.inf)",
    "kept least": "{s} + (1 - {keep}.to({s}.dtype)) * torch.finfo({s}.dtype).min",
    "kept least twice": "{s} + (1 - {keep}.to({s}.dtype)) * torch.finfo({s}.dtype).min * 2",
    "kept by integers": "{s} + ({keep}.long() - 1) * 10**12",
    "one visible": "{s}.masked_fill(at != 1, -torch.inf)",
    "first hidden": "{s}.masked_fill(at < 3, -1e35)",
    "all hidden": "torch.where({keep}.any(-1, keepdim=True) & (labels.sum() > 0), -1e35, {s})",
    "gate": "{s} + torch.where({gate} < 0, 0.0, -torch.inf)",
    "gate chosen": "torch.where({gate} < 0, {s}, -torch.inf)",
    "gate cut": "{s} + ({gate} > 0) * -1e32",
    "gate log": "{s} + torch.log(F.relu({gate}))",
    "gate overflows": "{s} - F.relu({gate}) * 1e308 * 1e10",
    "gate exp": "{s} - torch.exp({gate} * 4000)",
    "gate top": "{s}.masked_fill(({gate} + at / 7) < ({gate} + at / 7).amax(-1, keepdim=True), -torch.inf)",
    "scores cut": "torch.where({s} > 0, {s}, -torch.inf)",
    "scores top": "{s}.masked_fill(({s} + at / 7) < ({s} + at / 7).topk(min(2, t), -1).values[..., -1:], -torch.inf)",
    "table": "{s} + {number}",
    "table times": "{s} * torch.where({number} < 0, 1e36, 1.0)",
    "reciprocal": "{s} + (1 - 1 / {keep}.to({s}.dtype))",
    "integer reciprocal": "{s} + (1 - 1 / {keep}.long())",
    "exponential": "{s} - torch.exp((1 - {keep}.long()) * 1000.0) + 1",
    "integer exponential": "{s} - torch.exp((1 - {keep}.long()) * 1000) + 1",
    "power": "{s} + 1 - torch.pow((1 - {keep}.long()) * 9000.0 + 1, 12)",
    "products": "{s} - (1 - {keep}.long()) * 9e3 * 9e3 * 9e3 * 9e3 * 9e3 * 9e3 * 9e3 * 9e3 * 9e3",
    "overflowing products": "{s} - (1 - {keep}.long()) * 1e200 * 1e200",
    "log": "{s} + {keep}.to({s}.dtype).log()",
    "integer log": "{s} + {keep}.long().log2()",
    "less diagonal": "{s} - 1e35 * {eye}",
    "less diagonal alpha": "torch.sub({s}, {eye}, alpha=1e35)",
    "plus diagonal alpha": "torch.add({s}, {eye}, alpha=-1e35)",
    "over diagonal": "-{s}.abs() / (1 - {eye})",
    "over small": "-{s}.abs() / torch.where(at == at[:, None], 1e-36, 1.0)",
    "over distance": "-{s}.abs() / (at - at[:, None]).abs()",
    "power of distance": "{s} - (at - at[:, None]).abs().to({s}.dtype) ** -2",
    "log of distance": "{s} + torch.log((at - at[:, None]).abs().to({s}.dtype))",
    "steep": "{s} - 1e33 * (at[:, None] - at + 1)",
}
FILLS = {"finite": "torch.finfo({s}.dtype).min", "e30": "-1e30", "e9": "-1e9", "e4": "-1e4"}
TABLES = {  # what is looked up for each token, from banned [v]
    "index": "self.banned[labels]",
    "index select": "self.banned.index_select(0, labels.reshape(-1)).view(labels.shape)",
    "embedding": "F.embedding(labels, self.banned[:, None]).squeeze(-1)",
    "gather": "self.banned.gather(0, labels.reshape(-1)).view(labels.shape)",
    "one hot": "((labels[..., None] == torch.arange({v})).to(self.banned.dtype) @ self.banned.clamp(min=-1e35))",
}
# an attention sink: what its parameter starts with, less
SINKS = {"none": 0.0, "behind": 0.0, "front": 0.0, "low": 20.0, "lowest": 40.0, "high": -40.0}

# -- index arithmetic

# n [t]: positions, as numbers of some type
POSITIONS = {
    "plain": "torch.arange(t)",
    "int32": "torch.arange(t, dtype=torch.int32)",
    "float32": "torch.arange(t, dtype=torch.float32)",
    "steps": "torch.arange(0, 2 * t, 2)",
    "started": "torch.arange(3, t + 3)",
    "half steps": "torch.arange(0.0, t / 2, 0.5)[:t]",
    "down": "torch.arange(t - 1, -1, -1)",
    "summed": "torch.ones(t).cumsum(0)",
    "summed by more": "torch.full((t,), 1.5, dtype=torch.float64).cumsum(0)",
    "uint8": "torch.arange(t, dtype=torch.uint8)",
    "uint8 shifted": "torch.arange(t, dtype=torch.uint8) + 250",
    "uint8 behind": "torch.arange(t, dtype=torch.uint8) - 5",
    "uint8 product": "torch.arange(t, dtype=torch.uint8) * 31",
    "int8 product": "torch.arange(t, dtype=torch.int8) * 17",
    "int8 shifted": "torch.arange(t, dtype=torch.int8) + 122",
    "int16 product": "torch.arange(t, dtype=torch.int16) * 6000",
    "int32 product": "torch.arange(t, dtype=torch.int32) * 2**29",
    "int64 product": "torch.arange(t) * 2**61",
    "int64 shifted": "torch.arange(t) + (2**63 - 6)",
    "narrowed": "(torch.arange(t) + (2**31 - 6)).to(torch.int32)",
    "far in bfloat16": "torch.arange(1000, 1000 + t, dtype=torch.bfloat16)",
    "far in float16": "torch.arange(4000, 4000 + t).to(torch.float16)",
    "far in float32": "torch.arange(2**25, 2**25 + t).to(torch.float32)",
    "far in float64": "(torch.arange(t) + 2**55).double()",
    "of bool": "torch.arange(t).bool().long()",
}
# d: about key less row, of i [t 1] and j [1 t]
APART = {
    "less": "j - i",
    "turned": "i - j",
    "sub alpha 2": "torch.sub(j, i, alpha=2)",
    "sub alpha 0": "torch.sub(j, i, alpha=0)",
    "sub alpha -1": "torch.sub(i, j, alpha=-1)",
    "add alpha": "torch.add(j, i, alpha=-2)",
    "rsub": "torch.rsub(i, j)",
    "rsub alpha": "torch.rsub(i, j, alpha=3)",
    "shifted alpha": "torch.add(j - i, -1, alpha=4)",
    "floor divide": "(j - i) // 3",
    "floored": "torch.div(j - i, 2, rounding_mode='floor')",
    "truncated": "torch.div(j - i, 2, rounding_mode='trunc')",
    "divided": "(j - i) / 2",
    "rounded": "((j - i) / 2).round()",
    "remainder": "(j - i) % 4",
    "fmod": "torch.fmod(j - i, 3)",
    "far": "(j - i).abs() - 2",
    "square": "(j - i) * (j - i) - 9",
    "negative": "-(i - j)",
    "largest": "torch.maximum(j - i, i - j)",
    "clamped": "(j - i).clamp(-2, 1)",
    "chosen": "torch.where(j > i, i - j, j - i)",
    "rows by floats": "j - torch.floor(i * 0.5)",
    "as uint8": "(j - i).to(torch.uint8)",
    "turned as uint8": "(i - j).to(torch.uint8)",
    "as int8 times": "(j - i).to(torch.int8) * 30",
    "as int8 plus": "(j - i).to(torch.int8) + 120",
    "as bool": "(j - i).bool()",
    "as bool plus": "(j - i).bool().long() - 1",
    "as bfloat16 plus": "(j - i).to(torch.bfloat16) + 1000 - 1000",
    "as float16 plus": "(i - j).to(torch.float16) + 4096 - 4096",
    "as float32 plus": "(j - i).to(torch.float32) - 2**26 + 2**26",
    "as int times": "(j - i).to(torch.int32) * 2**29",
    "underflows": "(j - i).to(torch.float16) * 1e-8",
    "full wraps": "j - i - torch.full((), 250, dtype=torch.uint8) - 9",
    "full rounds": "j - i - torch.full((), 2.7, dtype=torch.int64)",
}
RELATIONS = {
    "<= 0": "{d} <= 0",
    "< 1": "{d} < 1",
    "<= 2": "{d} <= 2",
    ">= 0": "{d} >= 0",
    "> -4": "{d} > -4",
    "> 200": "{d} > 200",
    ">= 1": "{d} >= 1",
    "not > 0": "~({d} > 0)",
    "not < 0": "~({d} < 0)",
    "!= 0": "{d} != 0",
    "less 5 <= -5": "{d} + (-5) <= -5",
    "sign": "torch.sign({d}) <= 0",
}
# what a mask becomes together with others; each row sees itself in most
TOGETHER = {
    "or itself": "({seen}) | (at == at[:, None])",
    "alone": "{seen}",
    "and causal": "({seen}) & (at <= at[:, None]) | (at == at[:, None])",
    "or causal": "({seen}) | (at <= at[:, None])",
    "by numbers": "(({seen}).long() + (at == at[:, None])) > 0",
}


def arithmetic(positions: str, apart: str, relation: str, together: str) -> tuple[str, ...]:
    """The lines that make `seen` [t t]."""
    seen = RELATIONS[relation].format(d=f"({APART[apart]})")
    return (f"n = {POSITIONS[positions]}", "i, j = n[:, None], n[None, :]", f"seen = {TOGETHER[together].format(seen=seen)}")
