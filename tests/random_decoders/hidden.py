"""What is done to scores beside the mask of positions: keys hidden by data, by activations, by tables of tokens, by the diagonal.

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
