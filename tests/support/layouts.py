"""Batches as training runs bring them: padding, masked labels, packed documents."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

IGNORED = -100
Batch: TypeAlias = "dict[str, Any]"


def tokens(vocabulary: int, batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def plain(ids: Tensor) -> Batch:
    return {"input_ids": ids, "labels": ids}


def no_mask_given(ids: Tensor) -> Batch:
    return {**plain(ids), "attention_mask": torch.ones_like(ids)}


def left_padding(ids: Tensor) -> Batch:
    """Row 0 is full, the others begin with padding."""
    start = torch.arange(ids.shape[0]) % max(ids.shape[1] - 1, 1)
    mask = (torch.arange(ids.shape[1]) >= start[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def right_padding(ids: Tensor) -> Batch:
    length = ids.shape[1] - 3 * torch.arange(ids.shape[0]) % max(ids.shape[1] - 1, 1)
    mask = (torch.arange(ids.shape[1]) < length[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def prompt_masked(ids: Tensor) -> Batch:
    labels = ids.clone()
    labels[:, : ids.shape[1] // 2] = IGNORED
    return {"input_ids": ids, "labels": labels}


def no_labels_at_all(ids: Tensor) -> Batch:
    return {"input_ids": ids, "labels": torch.full_like(ids, IGNORED)}


def documents(length: int) -> Tensor:
    """Document numbers of a row: documents of 4, 1 and 6 tokens, and so on."""
    sizes = torch.tensor([4, 1, 6, 2]).repeat(length)
    return torch.repeat_interleave(torch.arange(len(sizes)), sizes)[:length]


def packed_by_positions(ids: Tensor) -> Batch:
    """Positions restart at each document; the model has to separate documents."""
    document = documents(ids.shape[1])
    first = torch.searchsorted(document, document)
    positions = (torch.arange(ids.shape[1]) - first).expand_as(ids).contiguous()
    return {**plain(ids), "position_ids": positions}


def packed_by_mask(ids: Tensor) -> Batch:
    """A boolean mask [B, 1, T, T]: the same document and not the future."""
    document = documents(ids.shape[1])
    mask = (document[:, None] == document[None, :]).tril()
    return {**plain(ids), "attention_mask": mask.expand(ids.shape[0], 1, -1, -1).contiguous()}


def packed_by_bias(ids: Tensor) -> Batch:
    """The same as an additive mask."""
    mask = packed_by_mask(ids)["attention_mask"]
    bias = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    return {**plain(ids), "attention_mask": bias}


LAYOUTS: dict[str, Callable[[Tensor], Batch]] = {
    function.__name__: function
    for function in (
        plain,
        no_mask_given,
        left_padding,
        right_padding,
        prompt_masked,
        no_labels_at_all,
        packed_by_positions,
        packed_by_mask,
        packed_by_bias,
    )
}
