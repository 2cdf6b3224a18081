"""Private interfaces of torch.distributed: texts that ranks exchange through a store, without a collective.

While ranks compile a graph, each writes a text, for example a list of its collectives, and reads the texts of the others, to
check that they agree. The store is the key-value store of the rendezvous, which all ranks can reach. A rank that cannot analyze
its graph does not wait: it *leaves* a text for the ranks that compile the same graph (the same `subject`).
"(2.11, 2.13)": the torch versions on which it was tested.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any, NamedTuple

import torch.distributed as dist

from streamfx.torch_private.groups import group_by_name

WAIT_LIMIT = timedelta(minutes=10)  # includes the compilation on the other ranks
MIN_PAUSE, MAX_PAUSE = 0.002, 0.2  # seconds between two polls of the store
WITHDRAWN = "nothing"  # stored in place of a withdrawn text


class RanksMissingError(Exception):
    """Not all ranks have written within the time limit."""


def ranks_of(group: str) -> Sequence[int]:
    """Return the global ranks of a group, given by name, in order; empty if this is the only process (2.11, 2.13).

    Also empty for the simulated ranks of the "fake" backend.
    """
    if not dist.is_available() or not dist.is_initialized():
        return ()
    process_group = group_by_name(group)
    return (
        ()
        if dist.get_backend(process_group) == "fake" or dist.get_world_size(process_group) == 1
        else dist.get_process_group_ranks(process_group)
    )


class RankChangedError(Exception):
    """A rank would write a text that differs from the agreed one; the error holds the agreed text."""


def exchange_texts(text: str, group: str, subject: str = "", waits: bool = True, about: str | None = None) -> list[str]:
    """Write a text, and return the texts of all ranks of a group, in order (2.11, 2.13).

    The n-th text of a rank is exchanged for the n-th texts of the other ranks. Texts go through the store of the rendezvous;
    devices send nothing. `subject` names the graph, as far as a rank knows it before its analysis. If not `waits`, the rank
    leaves its text for the ranks that write about the same subject, and returns only its own text.

    `about`: a topic. After all ranks have written the same text about it, later calls return only the rank's own text.

    Raises:
        RankChangedError: if the text differs from the text on which all ranks have agreed `about` the topic.
        RanksMissingError: if a rank does not write within the time limit.
    """
    from torch.distributed.distributed_c10d import _get_default_store  # 2.11, 2.13

    ranks = ranks_of(group)
    if not ranks:
        return [text]
    board = _Board(
        _get_default_store(), f"streamfx/{group}/{'-'.join(map(str, ranks))}", tuple(ranks), dist.get_rank(), _hash(subject)
    )
    agreed = None if about is None else board.agreed(about)
    if agreed is not None:
        if agreed != text:
            raise RankChangedError(agreed)
        return [text]
    if not waits:
        board.leave(text)
        return [text]
    texts = board.exchange(text)
    if about is not None and set(texts) == {text}:
        board.agree(about, text)
    return texts


def _hash(text: str) -> str:
    """Return the SHA-256 of a text in hexadecimal, for keys of the store."""
    return sha256(text.encode()).hexdigest()


class _Text(NamedTuple):
    """A rank's text about a subject (a hash); `attempt` counts the texts of this rank about the subject, from 1."""

    subject: str
    attempt: int
    text: str

    def to_stored(self) -> str:
        """Return the text with its subject and attempt, as it is stored."""
        return f"{self.subject} {self.attempt}\n{self.text}"

    @classmethod
    def read(cls, stored: str) -> _Text:
        """Parse the result of `to_stored`."""
        head, text = stored.split("\n", 1)
        subject, attempt = head.split(" ")
        return cls(subject, int(attempt), text)


@dataclass(frozen=True)
class _Board:
    """The texts that the ranks of a group exchange, keyed by index and rank, in a store that all ranks can reach.

    A rank that failed leaves a text without an index, so that ranks that do not compile this graph never read it. A rank
    that compiles it withdraws its own text, so that the indices of both ranks stay equal. Keys of the store:

        count/RANK           the number of texts that a rank has written and not withdrawn: the index of its last text
        INDEX/RANK           the text that a rank has written with an index
        begun/SUBJECT/RANK   the number of texts of a rank about a subject, left ones included
        left/SUBJECT         is set if any rank has left a text about a subject
        left/SUBJECT/RANK    the text that a rank left about a subject
        known/TOPIC/RANK     the text about a topic that, as this rank knows, all ranks have written
    """

    store: Any
    name: str  # prefix of all keys
    ranks: tuple[int, ...]  # of the group, in order
    rank: int  # this process
    subject: str  # hash of the name of the graph

    def exchange(self, text: str) -> list[str]:
        """Write a text; wait for, and return, the texts of all ranks with the same index, in order of ranks.

        If a failed rank has left a text about the subject instead, withdraw this text, and return the left texts (with this
        text in place of those of the other ranks).

        Raises:
            RanksMissingError: if a rank does not write within `WAIT_LIMIT`.
        """
        index = self.store.add(self._key("count", self.rank), 1)
        own_text = self._new_text(text)
        self.store.set(self._key(index, self.rank), own_text.to_stored())
        deadline, pause = time.monotonic() + WAIT_LIMIT.total_seconds(), MIN_PAUSE
        texts: dict[int, _Text] = {}
        while True:
            self._read_texts(index, texts)
            # left texts are read after the others, because a rank leaves a text before it writes its next one
            answered_ranks = {rank for rank, other in texts.items() if other.subject == self.subject}
            left_texts = {rank: left for rank, left in self._left_instead_of(own_text).items() if rank not in answered_ranks}
            if left_texts:
                self.store.set(self._key(index, self.rank), WITHDRAWN)
                self.store.add(self._key("count", self.rank), -1)
                return [left_texts.get(rank, text) for rank in self.ranks]
            if len(texts) == len(self.ranks):
                return [texts[rank].text for rank in self.ranks]
            if time.monotonic() > deadline:
                raise RanksMissingError(
                    f"nothing from rank {self._missing_ranks(index)} within {WAIT_LIMIT.total_seconds():.0f} seconds"
                )
            time.sleep(pause)
            pause = min(MAX_PAUSE, 1.2 * pause)

    def leave(self, text: str) -> None:
        """Write a text for ranks that compile the same graph, without waiting."""
        self.store.set(self._key("left", self.subject, self.rank), self._new_text(text).to_stored())
        self.store.set(self._key("left", self.subject), "yes")

    def agreed(self, about: str) -> str | None:
        """Return the text about a topic that all ranks agreed on; None if they have not agreed on it."""
        agreed_key = self._key("known", _hash(about), self.rank)
        return self.store.get(agreed_key).decode() if self.store.check([agreed_key]) else None

    def agree(self, about: str, text: str) -> None:
        """Store the text about a topic that all ranks have written."""
        self.store.set(self._key("known", _hash(about), self.rank), text)

    def _new_text(self, text: str) -> _Text:
        """Return a text of this rank about the subject, with its number (`attempt`), which the store counts."""
        return _Text(self.subject, int(self.store.add(self._key("begun", self.subject, self.rank), 1)), text)

    def _read_texts(self, index: int, texts: dict[int, _Text]) -> None:
        """Add to `texts` (by rank) the texts with this index that it lacks, once all ranks have written theirs.

        Until then, one check of the store covers hundreds of ranks. Texts that their authors will withdraw are not added.
        """
        absent = [rank for rank in self.ranks if rank not in texts]
        if self.store.check([self._key(index, rank) for rank in absent]):
            new_texts = {rank: item for rank in absent if (item := self._load_text(self._key(index, rank))) is not None}
            texts.update({rank: item for rank, item in new_texts.items() if not self._is_withdrawn(item, {**texts, **new_texts})})

    def _missing_ranks(self, index: int) -> str:
        """Return the ranks that have written no text with this index, as "2, 5", for an error message."""
        texts = {rank: item for rank in self.ranks if (item := self._load_text(self._key(index, rank))) is not None}
        present_ranks = {rank for rank, item in texts.items() if not self._is_withdrawn(item, texts)}
        return ", ".join(str(rank) for rank in self.ranks if rank not in present_ranks)

    def _left_instead_of(self, text: _Text) -> dict[int, str]:
        """Return, by rank, the texts that failed ranks have left instead of an answer to `text`.

        Only those of at least the same attempt: an earlier one belongs to an earlier compilation of this subject.
        """
        if not self.store.check([self._key("left", text.subject)]):
            return {}
        left_texts = {rank: self._load_text(self._key("left", text.subject, rank)) for rank in self.ranks}
        return {rank: item.text for rank, item in left_texts.items() if item is not None and item.attempt >= text.attempt}

    def _is_withdrawn(self, text: _Text, others: Mapping[int, _Text]) -> bool:
        """Return whether the author of a text about another subject will withdraw it.

        It will, once it reads a text that a rank left instead of an answer, unless that rank is among the authors of
        `others` (by rank) about that subject: then it left its text later, after it had read all of `others`.
        """
        if text.subject == self.subject:
            return False
        answered_ranks = {rank for rank, item in others.items() if item.subject == text.subject}
        return not self._left_instead_of(text).keys() <= answered_ranks

    def _load_text(self, key: str) -> _Text | None:
        """Return the text stored under a key; None if there is no text, or if it is withdrawn."""
        stored = self.store.get(key).decode() if self.store.check([key]) else WITHDRAWN
        return None if stored == WITHDRAWN else _Text.read(stored)

    def _key(self, *parts: str | int) -> str:
        """Return a key of the store; the class lists them."""
        return "/".join((self.name, *map(str, parts)))
