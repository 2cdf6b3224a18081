"""Private interfaces of torch.distributed: what ranks write down for each other, without a collective."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from hashlib import sha256

import torch.distributed as dist

from streamfx.torch_private.groups import group_called

LIMIT = timedelta(minutes=10)  # for the others to compile as well


class Missing(Exception):
    """Not all ranks have written within the time limit."""


def ranks_of(group: str) -> Sequence[int]:
    """The ranks of a group by its name, in their order; none where no other process is there to read (2.11, 2.13)."""
    if not dist.is_available() or not dist.is_initialized():
        return ()
    found = group_called(group)
    return () if dist.get_backend(found) == "fake" or dist.get_world_size(found) == 1 else dist.get_process_group_ranks(found)


class Changed(Exception):
    """A rank would write something else of what ranks have agreed on; it holds what they agreed on."""


def written_by_all(text: str, group: str, waits: bool = True, about: str | None = None) -> list[str]:
    """What each rank of a group writes, in their order: the n-th text of one rank goes with the n-th of the others.

    A text `about` something is not written again once all ranks have written the same of that, and no other may follow it. A rank
    that does not wait hears nothing of the others. Texts go through the store that ranks met by; nothing is sent between devices
    (2.11, 2.13).
    """
    from torch.distributed.distributed_c10d import _get_default_store  # 2.11, 2.13

    ranks = ranks_of(group)
    if not ranks:
        return [text]
    store, own = _get_default_store(), f"streamfx/{group}/{'-'.join(map(str, ranks))}"
    known = f"{own}/known/{sha256((about or text).encode()).hexdigest()}/{dist.get_rank()}"
    if about is not None and store.check([known]):
        if (agreed := store.get(known).decode()) != text:
            raise Changed(agreed)
        return [text]
    number = store.add(f"{own}/count/{dist.get_rank()}", 1)
    store.set(f"{own}/{number}/{dist.get_rank()}", text)
    if not waits:
        return [text]
    keys = [f"{own}/{number}/{rank}" for rank in ranks]
    try:
        store.wait(keys, LIMIT)
    except RuntimeError as error:
        absent = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
        raise Missing(f"nothing from rank {', '.join(map(str, absent))} within {LIMIT.total_seconds():.0f} seconds") from error
    texts = [store.get(key).decode() for key in keys]
    if set(texts) == {text}:
        store.set(known, text)
    return texts
