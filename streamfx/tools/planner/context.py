"""Parallelism within a layer: tensor parallelism, and context parallelism (Ulysses).

In context parallelism, each rank has a slice of the sequence, and for attention the full sequence of a slice of the heads.

    rows/n of all heads  ->  all to all  ->  all rows of heads/n  ->  attention  ->  all to all  ->  rows/n of all heads

Jacobs et al., 2023, "DeepSpeed Ulysses" (arXiv 2309.14509). If there are fewer key heads than ranks, each head is sent to several
ranks, and labels are shifted before the sequence is split: as in Bekman et al., 2025, "Arctic Long Sequence Training"
(2506.13996). Position ids belong to the rank's slice and come from the caller.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamfx.errors import PlanError
from streamfx.tools.planner.models import size_of

NAME = "streamfx_ulysses"


@dataclass(frozen=True)
class Ulysses:
    """An attention function for transformers, around torch's kernel. Heads [b h t e]; input and output are one rank's rows."""

    group: Any
    ranks: int

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **keywords: Any
    ) -> tuple[Tensor, None]:
        """Run attention on all rows of this rank's heads, and return this rank's rows of all heads."""
        if mask is not None or keywords.get("s_aux") is not None:
            raise PlanError("context needs causal attention", found="a mask or a sink", do="plan without context")
        key, value = (part.repeat_interleave(max(1, self.ranks // part.shape[1]), 1) for part in (key, value))
        query, key, value = map(self.all_rows, (query, key, value))
        grouped = key.shape[1] != query.shape[1]
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=keywords.get("scaling"), enable_gqa=grouped
        )
        return self.own_rows(mixed), None

    def all_rows(self, heads: Tensor) -> Tensor:
        """[b nh t e] -> [b h nt e]"""
        return self._exchanged(heads.unflatten(1, (self.ranks, -1)).permute(1, 3, 0, 2, 4)).flatten(0, 1).permute(1, 2, 0, 3)

    def own_rows(self, mixed: Tensor) -> Tensor:
        """[b h nt e] -> [b t nh e], the order that transformers wants"""
        return self._exchanged(mixed.permute(2, 0, 1, 3).unflatten(0, (self.ranks, -1))).permute(2, 1, 0, 3, 4).flatten(2, 3)

    def _exchanged(self, parts: Tensor) -> Tensor:
        """Send part i to rank i."""
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        return all_to_all_single_autograd(parts.contiguous(), None, None, self.group)


@contextmanager
def context_parallel_attention(model: nn.Module, group: Any, ranks: int) -> Iterator[None]:
    """Replace the model's attention by the context-parallel one, in place, and restore it on exit."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config: Any = model.config
    saved = config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[NAME] = Ulysses(group, ranks)
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = saved
        del ALL_ATTENTION_FUNCTIONS[NAME]


def check_heads(model: nn.Module, tensor: int, context: int) -> None:
    """Refuse a model whose heads cannot be split: by tensor parallelism (weights), then by context parallelism (sequences)."""
    config = getattr(model, "config", None)
    heads = size_of(config, "num_attention_heads")
    asked = f"tensor={tensor} and context={context} must divide the heads"
    if heads is None:
        raise PlanError(asked, found="a model whose configuration has no num_attention_heads", do="give a configuration")
    keys = size_of(config, "num_key_value_heads") or heads
    if heads % (tensor * context):
        raise PlanError(asked, found=f"{heads} heads", do=f"let tensor * context be one of {_divisors(heads)}")
    if keys % tensor:
        raise PlanError(asked, found=f"{keys} key heads", do=f"let tensor be one of {_divisors(keys)}")
    if context > 1 and (keys // tensor) % context and context % (keys // tensor):
        found = f"{keys // tensor} key heads on each rank"
        raise PlanError(asked, found=found, do=f"let context be a multiple of {keys // tensor}, or divide it")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if context > 1 and kinds != {"full_attention"}:
        found = f"layers of {', '.join(sorted(kinds))}"
        raise PlanError("context needs full causal attention in all layers", found=found, do="plan without context")


def _divisors(count: int) -> str:
    """Return the divisors of a count as text."""
    return ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)


def part_of_a_sequence(batch: int, rows: int) -> dict[str, Tensor]:
    """Return the inputs of one rank: ids, position ids, and labels that are already shifted."""
    ids, positions, labels = (torch.empty(batch, rows, dtype=torch.int64, device="meta") for _ in range(3))
    return {"input_ids": ids, "position_ids": positions, "labels": ids, "shift_labels": labels}


# -- tensor parallelism by the plan of a configuration, as transformers applies it for `tp_plan="auto"`
#
# Transformers' own code splits the layers, so the graph equals that of a real rank. A head whose logits would be gathered is
# not split: the gather needs the logits of all positions at once, while an unsplit head can be chunked.


GATHERED = "colwise_gather_output"
LAYER_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


@contextmanager
def tensor_parallel_layers(model: nn.Module, mesh: Any) -> Iterator[None]:
    """Context manager: split the layers over `mesh`, in place, as the model's `tp_plan` says.

    The original modules are restored when the block ends, even if it raises an error.
    """
    saved = [(module, dict(module.__dict__), dict(module._parameters)) for module in model.modules()]
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    apply_tensor_parallelism(model, mesh, styles_of(model))
    try:
        yield
    finally:
        for module, attributes, parameters in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._parameters.clear()
            module._parameters.update(parameters)


def styles_of(model: nn.Module) -> dict[str, str]:
    """Return the parallel style of each split module and parameter by name; empty if there is no plan."""
    plan = getattr(model, "tp_plan", None) or {}
    by_name = {name: plan.get(LAYER_INDEX.sub("*", name)) for name, _ in model.named_modules()}
    styles = {name: style for name, style in by_name.items() if style not in (None, GATHERED)}
    inner = {name: styles.get(name.rpartition(".")[0]) for name, _ in model.named_parameters()}
    return {**styles, **{name: style for name, style in inner.items() if style is not None}}


def check_plan(model: nn.Module) -> None:
    """Refuse a model without a plan, and a version of transformers without the code for it."""
    do = "plan with tensor=1, or install a version of transformers that supports it"
    try:
        import transformers.distributed.tensor_parallel  # noqa: F401
    except ImportError:
        raise PlanError(
            "tensor parallelism needs transformers' code for it", found="a version of transformers without it", do=do
        ) from None
    if not styles_of(model):
        raise PlanError("tensor parallelism needs the tp_plan of a configuration", found="a model without one", do=do)
