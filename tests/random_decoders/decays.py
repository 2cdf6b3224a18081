"""Products with weights that decay, over rows or over blocks of them, as lines of a program; some diagonals are elsewhere."""

from __future__ import annotations

from random import Random

from tests.random_decoders.writer import Writer

LOGS = ("-F.softplus(r[..., 0])", "-r[..., 0].square()", "r.sum(-1).clamp(max=0)", "r[..., 0].tanh()")
REPEATED = "v[..., None].expand(*v.shape, v.shape[-1])"
TOTALS = (
    f"{REPEATED}.masked_fill(~(ones.tril({{strict}})), 0).cumsum(-2)",
    "v.cumsum(-1)[..., :, None] - v.cumsum(-1)[..., None, :]",
    f"{REPEATED}.tril({{strict}}).cumsum(-2)",
)
WEIGHTS = (
    "totals.masked_fill(~ones.tril({diagonal}), {hidden}).exp()",
    "torch.where(ones.tril({diagonal}), totals, {hidden}).exp()",
    "totals.clamp(max=50).exp().tril({diagonal})",
    "totals.exp().tril({diagonal})",
    "totals.masked_fill(ones.triu(1 - {diagonal}), {hidden}).exp()",
)
PRODUCTS = ("torch.einsum('bcz,bzd->bcd', w, v)", "w @ v", "torch.einsum('bzd,bcz->bcd', v, w)", "torch.bmm(w, v)")


def decayed(w: Writer, form: str, i: int) -> None:
    """From `z` to `z`."""
    random, d = Random(w.decoder.seed * 7 + i), w.decoder.width
    there, back = {"time first": ("z.transpose(0, 1)", ".transpose(0, 1)"), "unbatched": ("z[None]", "[0]")}.get(
        w.decoder.layout, ("z", "")
    )
    own = {
        "strict": random.choice((-1, -1, -1, -1, 0, -2)),
        "diagonal": random.choice((0, 0, 0, 0, 1, -1)),
        "hidden": random.choice(("-torch.inf", "-torch.inf", "-1e9", "-30.0")),
    }
    w.line(f"r = {there}", f"a = {random.choice(LOGS)}")
    made = (
        "ones = torch.ones(v.shape[-1], v.shape[-1], dtype=torch.bool)",
        f"totals = {random.choice(TOTALS).format(**own)}",
        f"w = {random.choice(WEIGHTS).format(**own)}",
    )
    if form == "decays of rows":
        w.line("v = a", *made, "v = r", f"y = {random.choice(PRODUCTS)}")
    else:
        first = random.choice(("torch.zeros_like(s[:, :1])", f"s.new_ones(len(s), 1, 1) * {w.parameter(f'first{i}', d)}"))
        w.line(
            f"size = {random.choice((2, 3))}",
            "s = F.pad(r, (0, 0, 0, -r.shape[1] % size)).unflatten(1, (-1, size))",
            "sums = F.pad(a, (0, -r.shape[1] % size)).unflatten(1, (-1, size)).cumsum(-1)",
            "p, s = s, ((sums[..., -1:] - sums).exp()[..., None] * s).sum(2)",
            "v = F.pad(sums[..., -1], (1, 0))",
            *made,
            f"v = torch.cat([{first}, s], 1)",
            f"v = {random.choice(PRODUCTS)}",
            "y = (p + sums.exp()[..., None] * v[:, :-1, None]).flatten(1, 2)[:, :r.shape[1]]",
            *(["y = y + 0.1 * v[:, -1][:, None]"] if random.random() < 0.3 else []),
        )
    w.line(f"z = y{back}")
