"""Terms of blocks of rows that read one table, made of no rows: each of these readers may have axes of its own."""

from __future__ import annotations

_BLOCKS = "y = [(x[:, i : i + 3], min(3, t - i)) for i in range(0, t, 3)]"
TABLES: dict[str, tuple[str, ...]] = {
    name: (_BLOCKS, f"d = {table}", f"z = torch.cat([{made} for u, n in y], 1)", f"term = ({used}).square().mean()")
    for name, table, made, used in (
        ("decays of blocks", "(torch.arange(3.0) * -0.3).exp().to(x)[:, None]", "u * d[:n]", "z * x"),
        ("decays from the end", "(torch.arange(3.0) * -0.3).exp().to(x)[:, None]", "u * d[-n:]", "z.cumsum(1)"),
        ("pairs of blocks", "(torch.arange(9.0) * 0.3).cos().view(3, 3).tril().to(x)", "((u @ u.mT) * d[:n, :n]) @ u", "z * x"),
        ("a table of all rows", "(at * 0.3).cos().to(x)[:, None]", "u * d[:n]", "z * x * d"),
        ("a trained table", "self.one[:1, None].expand(3, 1) * 0.5", "u * d[:n]", "z * x"),
        ("rows turned by a table", "(torch.arange(3.0) * 0.3).cos().to(x)[:, None]", "u.flip(1) * d[:n]", "z * x"),
        ("one block of a table", "(torch.arange(3.0) * 0.3).cos().to(x)[:, None]", "y[0][0] * d[: min(3, t)]", "z.sum(1)"),
    )
}
