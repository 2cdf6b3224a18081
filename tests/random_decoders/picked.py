"""Terms added to the loss, of the last x [b t d] and labels [b t]: picked rows, bags of look-ups, pools over neighbors."""

from __future__ import annotations

_IDS = "i = (labels[..., None] + torch.arange(3)) % x.shape[-1]"
_WINDOWS = "z = x.transpose(1, 2)"
PICKED: dict[str, tuple[str, ...]] = {
    "rows of a list": ("term = x[:, [0, -1, t // 2]].square().square().mean()",),
    "rows of a list, one twice": ("term = (x[:, [0, t - 1, 0]] * torch.arange(1, 4)[:, None]).square().mean()",),
    "rows by arange": ("term = x.index_select(1, torch.arange(t // 2, t)).square().square().mean()",),
    "every row by arange": ("term = (x.index_select(1, torch.arange(t)) * x.sin()).square().mean()",),
    "rows in reverse by arange": ("term = (x.index_select(1, torch.arange(t - 1, -1, -1)) * x.sin()).square().mean()",),
    "rows by labels": ("term = (x.gather(1, (labels % t)[..., None].expand_as(x)) * x).square().mean()",),
    "rows along a dimension": ("term = (torch.take_along_dim(x, (labels % t)[..., None], 1) * x).square().mean()",),
    "rows added by a list": (
        "z = torch.zeros_like(x).index_add(1, torch.tensor([0, t - 1, 0]), x[:, [0, t // 2, -1]])",
        "term = (z * x).square().mean()",
    ),
    "rows written by labels": (
        "z = torch.zeros_like(x).scatter_add(1, (labels % t)[..., None].expand_as(x), x)",
        "term = (z * x.cos()).square().mean()",
    ),
    "rows that are not zero": (
        "n = torch.nonzero_static((labels > 1).flatten(), size=b * t, fill_value=0).squeeze(1)",
        "term = (x.flatten(0, 1)[n] * torch.arange(b * t)[:, None]).square().mean()",
    ),
    "bags": (_IDS, "z = F.embedding_bag(i.flatten(0, 1), self.square, mode='sum')", "term = (z.view_as(x) * x).square().mean()"),
    "bags by offsets": (
        _IDS,
        "z = F.embedding_bag(i.flatten(), self.square, torch.arange(0, 3 * b * t, 3), mode='mean')",
        "term = (z.view_as(x) * x).square().mean()",
    ),
    "bags of other sizes": (
        _IDS,
        "z = F.embedding_bag(i.flatten(), self.square, torch.arange(b * t) * 2, mode='sum')",
        "term = (z.view_as(x) * x).square().mean()",
    ),
    "weighted bags": (
        _IDS,
        "w = x[..., :1].sin().expand(b, t, 3).flatten(0, 1)",
        "z = F.embedding_bag(i.flatten(0, 1), self.square, mode='sum', per_sample_weights=w, padding_idx=1)",
        "term = (z.view_as(x) * x).square().mean()",
    ),
    "largest of bags": (
        _IDS,
        "z = F.embedding_bag(i.flatten(0, 1), self.square, mode='max')",
        "term = (z.view_as(x) * x).square().mean()",
    ),
    "means of neighbors": (_WINDOWS, "term = (F.avg_pool1d(z, 3, 1, 1) * z).square().mean()"),
    "means of earlier rows": (_WINDOWS, "term = (F.avg_pool1d(F.pad(z, (2, 0)), 3, 1) * z).square().mean()"),
    "means of pairs": (_WINDOWS, "term = F.avg_pool1d(z, 2, 2, ceil_mode=True).square().square().mean()"),
    "largest of neighbors": (_WINDOWS, "term = (F.max_pool1d(z, 3, 1, 1) * z).square().mean()"),
    "windows of rows": ("term = (F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1) * torch.arange(1, 4)).sum(-1).mul(x).square().mean()",),
}
