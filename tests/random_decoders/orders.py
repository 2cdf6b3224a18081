"""Terms of rows that are sorted, worked on in their new order, and put back, or not quite."""

from __future__ import annotations

_COLUMNS = "[..., None].expand_as(x)"
ORDERS: dict[str, tuple[str, ...]] = {
    f"{name} of {keys}": (
        f"p = ({number}).argsort(1)",
        f"z = x.gather(1, p{_COLUMNS})",
        f"z = {made}",
        f"n = {undone}",
        f"term = ({used}).square().mean()",
    )
    for keys, number in (("labels", "labels % 4"), ("rows", "x.detach()[..., 0]"), ("places", "at.flip(0).expand_as(labels)"))
    for name, made, undone, used in (
        ("neighbours", "z.cumsum(1).sin()", "p.argsort(1)", f"z.gather(1, n{_COLUMNS}) * x"),
        ("rows scattered", "z * 2", "torch.zeros_like(p).scatter(1, p, at.expand_as(p))", f"z.gather(1, n{_COLUMNS}) * x"),
        ("rows alone", "z.square()", "p.argsort(1)", f"z.gather(1, n{_COLUMNS})"),
        ("the same order", "z.cumsum(1).sin()", "p", f"z.gather(1, n{_COLUMNS}) * x"),
        ("the order of largest", "z.cumsum(1).sin()", "p.argsort(1, descending=True)", f"z.gather(1, n{_COLUMNS}) * x"),
        ("added rows", "z.cumsum(1).sin()", "p.argsort(1)", f"torch.zeros_like(x).scatter_add(1, n{_COLUMNS}, z) * x"),
        ("rows added in order", "z.cumsum(1).sin()", "p", f"torch.zeros_like(x).scatter_add(1, n{_COLUMNS}, z)"),
    )
}
