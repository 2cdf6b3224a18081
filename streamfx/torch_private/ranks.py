"""Private interfaces of torch.distributed: texts that ranks exchange through a store, without a collective."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any, NamedTuple

import torch.distributed as dist

from streamfx.torch_private.groups import group_called

LIMIT = timedelta(minutes=10)  # for the other ranks to compile, too
SHORT, LONG = 0.002, 0.2  # seconds between two polls of the store
NOTHING = "nothing"  # in place of a withdrawn text


class RanksMissingError(Exception):
    """Not all ranks have written within the time limit."""


def ranks_of(group: str) -> Sequence[int]:
    """Return the ranks of a group by its name, in order; empty if there is no other process (2.11, 2.13)."""
    if not dist.is_available() or not dist.is_initialized():
        return ()
    process_group = group_called(group)
    return (
        ()
        if dist.get_backend(process_group) == "fake" or dist.get_world_size(process_group) == 1
        else dist.get_process_group_ranks(process_group)
    )


class RankChangedError(Exception):
    """A rank would write a text that differs from the agreed one; the error holds the agreed text."""


def written_by_all(text: str, group: str, subject: str = "", waits: bool = True, about: str | None = None) -> list[str]:
    """Return the texts of all ranks of a group, in order: the n-th text of one rank goes with the n-th of the others.

    `subject` is the topic of the text, as far as a rank knows it before any analysis. A rank that does not wait gets no
    texts of the others; its text is only for ranks that write about the same subject.

    Once all ranks have written the same text `about` a topic, it is no longer exchanged, and a different text raises an
    error. Texts go through the store of the rendezvous; nothing is sent between devices (2.11, 2.13).
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
    texts = board.exchanged(text)
    if about is not None and set(texts) == {text}:
        board.agree(about, text)
    return texts


def _hash(text: str) -> str:
    """Return the SHA-256 of a text, for keys of the store."""
    return sha256(text.encode()).hexdigest()


class _Text(NamedTuple):
    """A rank's text about a subject, and the number of texts about it that the rank had started by then."""

    subject: str
    attempt: int
    text: str

    def written(self) -> str:
        """Return the text with its subject and attempt, as it is stored."""
        return f"{self.subject} {self.attempt}\n{self.text}"

    @classmethod
    def read(cls, stored: str) -> _Text:
        """Parse a stored text."""
        head, text = stored.split("\n", 1)
        subject, attempt = head.split(" ")
        return cls(subject, int(attempt), text)


@dataclass(frozen=True)
class _Board:
    """The board on which the ranks of a group write texts for each other: by number and rank, in a store that all can reach.

    A rank that failed leaves a text without a number: ranks that do not compile that graph never see it. A rank that does
    compile it withdraws its own text, so that the numbers of both go on as if there had been none.
    """

    store: Any
    name: str
    ranks: tuple[int, ...]
    rank: int
    subject: str

    def exchanged(self, text: str) -> list[str]:
        """Write a text; wait for the matching texts of the others, or for a text that a failed rank has left."""
        number, own_text = self.store.add(self._counter, 1), self._new_text(text)
        self._store_text(self._slot(number, self.rank), own_text)
        deadline, pause = time.monotonic() + LIMIT.total_seconds(), SHORT
        texts: dict[int, _Text] = {}
        while True:
            self._read_texts(number, texts)
            # checked last: a rank leaves a text before it writes its next one
            answered_ranks = {rank for rank, item in texts.items() if item.subject == self.subject}
            left_texts = {rank: item for rank, item in self._left_instead_of(own_text).items() if rank not in answered_ranks}
            if left_texts:
                self.store.set(self._slot(number, self.rank), NOTHING)
                self.store.add(self._counter, -1)
                return [left_texts.get(rank, text) for rank in self.ranks]
            if len(texts) == len(self.ranks):
                return [texts[rank].text for rank in self.ranks]
            if time.monotonic() > deadline:
                raise RanksMissingError(
                    f"nothing from rank {self._missing_ranks(number)} within {LIMIT.total_seconds():.0f} seconds"
                )
            time.sleep(pause)
            pause = min(LONG, 1.2 * pause)

    def leave(self, text: str) -> None:
        """Write a text for ranks that compile the same graph, without waiting."""
        self._store_text(self._left_key(self.rank, self.subject), self._new_text(text))
        self.store.set(self._left_flag(self.subject), "yes")

    def agreed(self, about: str) -> str | None:
        """Return the text about a topic that all ranks agreed on; None if there is none."""
        agreed_key = self._agreed_key(about)
        return self.store.get(agreed_key).decode() if self.store.check([agreed_key]) else None

    def agree(self, about: str, text: str) -> None:
        """Store the text about a topic that all ranks have written."""
        self.store.set(self._agreed_key(about), text)

    def _new_text(self, text: str) -> _Text:
        """Start a text of this rank about the subject, and count it."""
        return _Text(self.subject, int(self.store.add(f"{self.name}/begun/{self.subject}/{self.rank}", 1)), text)

    def _read_texts(self, number: int, texts: dict[int, _Text]) -> None:
        """Fill in the texts with a number, once all ranks have written: one check covers hundreds of ranks."""
        absent = [rank for rank in self.ranks if rank not in texts]
        if self.store.check([self._slot(number, rank) for rank in absent]):
            new_texts = {rank: item for rank in absent if (item := self._load_text(self._slot(number, rank))) is not None}
            texts.update({rank: item for rank, item in new_texts.items() if not self._is_withdrawn(item, {**texts, **new_texts})})

    def _missing_ranks(self, number: int) -> str:
        """Return the ranks whose text is missing."""
        texts = {rank: item for rank in self.ranks if (item := self._load_text(self._slot(number, rank))) is not None}
        present_ranks = {rank for rank, item in texts.items() if not self._is_withdrawn(item, texts)}
        return ", ".join(str(rank) for rank in self.ranks if rank not in present_ranks)

    def _left_instead_of(self, text: _Text) -> dict[int, str]:
        """Return, by rank, the texts that were left instead of the one that matches `text`."""
        if not self.store.check([self._left_flag(text.subject)]):
            return {}
        left_texts = {rank: self._load_text(self._left_key(rank, text.subject)) for rank in self.ranks}
        return {rank: item.text for rank, item in left_texts.items() if item is not None and item.attempt >= text.attempt}

    def _is_withdrawn(self, text: _Text, others: Mapping[int, _Text]) -> bool:
        """Return whether the author of a text will withdraw it, once it reads the text that another rank has left instead.

        It will if that other rank is not among the authors of `others` about the same subject. One that is has left its
        text later, after it had read them all.
        """
        if text.subject == self.subject:
            return False
        answered_ranks = {rank for rank, item in others.items() if item.subject == text.subject}
        return not self._left_instead_of(text).keys() <= answered_ranks

    def _load_text(self, key: str) -> _Text | None:
        """Return the text stored under a key; None if there is none, or if it is withdrawn."""
        stored = self.store.get(key).decode() if self.store.check([key]) else NOTHING
        return None if stored == NOTHING else _Text.read(stored)

    def _store_text(self, key: str, text: _Text) -> None:
        """Store a text under a key."""
        self.store.set(key, text.written())

    def _slot(self, number: int, rank: int) -> str:
        """Return the key of the text with a number of a rank."""
        return f"{self.name}/{number}/{rank}"

    def _left_key(self, rank: int, subject: str) -> str:
        """Return the key of the text that a rank left about a subject."""
        return f"{self.name}/left/{subject}/{rank}"

    def _left_flag(self, subject: str) -> str:
        """Return the key that is set once any rank has left a text about a subject."""
        return f"{self.name}/left/{subject}"

    def _agreed_key(self, about: str) -> str:
        """Return the key of this rank's agreed text about a topic."""
        return f"{self.name}/known/{_hash(about)}/{self.rank}"

    @property
    def _counter(self) -> str:
        """The key of the number of texts that this rank has written."""
        return f"{self.name}/count/{self.rank}"
