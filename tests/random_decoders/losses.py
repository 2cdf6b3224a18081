"""The head and losses of many kinds, as lines of a program."""

from __future__ import annotations

from tests.random_decoders.layouts import Layout
from tests.random_decoders.mixers import MIXES
from tests.random_decoders.writer import Writer


def head(w: Writer) -> None:
    """Write `logits` from `x`."""
    d, v = w.decoder.width, w.decoder.vocabulary
    if w.decoder.mixed_before_norm != "none":
        w.line(mixed(w.decoder.mixed_before_norm, w.layout, "x"))
    if w.decoder.final_norm:
        w.line(f"x = {w.norm('spelled', 'last_norm', d)}(x)")
    if w.decoder.mixed_after_norm != "none":
        w.line(mixed(w.decoder.mixed_after_norm, w.layout, "x"))
    if w.decoder.bend != "none" and w.decoder.bend_at == "x":
        w.line("x = Bend.apply(x)")
    if w.decoder.embedding == "tied":
        w.line("logits = x @ self.embed.weight.t()")
    else:
        w.line(f"logits = {w.linear('head', d, v)}(x)")
    if w.decoder.capped:
        w.line("logits = 3 * torch.tanh(logits / 3)")
    if w.decoder.mixed_logits != "none":
        w.line(mixed(w.decoder.mixed_logits, w.layout, "logits"))
    if w.decoder.bend != "none" and w.decoder.bend_at == "logits":
        w.line("logits = Bend.apply(logits)")


def loss(w: Writer) -> None:
    """Write `loss` from `logits` and `labels`."""
    v, time = w.decoder.vocabulary, w.layout.time
    flat = f"logits.reshape(-1, {v}), labels.reshape(-1)"
    match w.decoder.loss:
        case "mean" | "sum" as reduction:
            w.line(f"loss = F.cross_entropy({flat}, reduction='{reduction}')")
        case "none":
            w.line(f"loss = F.cross_entropy({flat}, reduction='none').square().mean()")
        case "ignored":
            w.line("labels = labels.masked_fill(labels == 2, -100)", f"loss = F.cross_entropy({flat}, reduction='sum')")
            w.line("loss = loss / (labels != -100).sum().clamp(min=1)")
        case "smoothed":
            w.line(f"loss = F.cross_entropy({flat}, label_smoothing=0.1)")
        case "shifted":
            logits, labels = w.layout.cut("logits", ":-1"), w.layout.cut("labels", "1:")
            w.line(f"loss = F.cross_entropy({logits}.reshape(-1, {v}), {labels}.reshape(-1))")
        case "shifted labels":
            fill = f"torch.full_like({w.layout.cut('labels', ':1')}, -100)"
            w.line(f"labels = torch.cat(({w.layout.cut('labels', '1:')}, {fill}), {time})")
            w.line(f"loss = F.cross_entropy({flat}, ignore_index=-100)")
        case "weighted":
            w.line("weights = (labels + 1).to(logits.dtype)", f"each = F.cross_entropy({flat}, reduction='none')")
            w.line("loss = (each * weights.reshape(-1)).sum() / weights.sum()")
        case "z":
            w.line(f"loss = F.cross_entropy({flat}) + 0.1 * torch.logsumexp(logits, -1).square().mean()")
        case "entropy":
            w.line("p = torch.log_softmax(logits, -1)", f"loss = F.cross_entropy({flat}) + 0.1 * (p.exp() * p).sum(-1).mean()")
        case "divergence":
            other = w.linear("other_head", w.decoder.width, v)
            w.line("p = torch.log_softmax(logits, -1)", f"q = torch.log_softmax({other}(x), -1)")
            w.line("loss = F.kl_div(p, q, log_target=True, reduction='batchmean')")
        case "squares":
            w.line(f"loss = F.cross_entropy({flat}) + 0.1 * x.square().sum()")
        case "last":
            last = w.layout.cut("logits", "-1"), w.layout.cut("labels", "-1")
            w.line(f"loss = F.cross_entropy({last[0]}, {last[1]})")
        case "largest":
            w.line("loss = logits.amax(-1).mean()")
        case "filtered":
            w.line("least = logits.topk(min(3, logits.shape[-1]), -1).values[..., -1:]")
            w.line("logits = torch.where(logits < least, -1e4, logits)", f"loss = F.cross_entropy({flat})")
        case "best":
            w.line("loss = (logits * (logits == logits.amax(-1, keepdim=True))).sum(-1).mean()")
        case "margin":
            w.line("loss = (logits.amax(-1) - logits.amin(-1)).square().mean()")
        case kind:
            _of_sequences(w, kind)


def _of_sequences(w: Writer, kind: str) -> None:
    """Losses that are no sum over tokens: of the log-probability of each sequence."""
    time = w.layout.time
    w.line("each = torch.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)")
    if w.decoder.sums in ("masked", "selected"):
        w.line(
            {"masked": "each = each * (labels != 1)", "selected": "each = torch.where(labels != 1, each, 0.0)"}[w.decoder.sums]
        )
    w.line(f"total = each.sum({time})" + (f" / (1 + (labels != 1).sum({time}))" if w.decoder.sums == "normalized" else ""))
    if kind == "preferences":
        w.line("loss = -F.logsigmoid(0.1 * (total[0] - total[-1])) - F.logsigmoid(0.1 * total).mean()")
    else:
        w.line("loss = (total / t).exp().mean() - total.square().mean().sqrt()")


def mixed(name: str, layout: Layout, value: str) -> str:
    """The line that mixes `value`."""
    over = {(0, True): "[:, None, None]", (0, False): "[:, None]"}.get((layout.time, "," in layout.sizes), "[:, None]")
    parts = {"over": over, "time": layout.time, "last": layout.cut("x", "-1:"), "first": layout.cut("x", ":1")}
    line = MIXES[name].format(**parts)
    return f"{value} = (lambda x: {line})({value})" if value != "x" else f"x = {line}"
