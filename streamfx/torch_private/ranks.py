"""Private interfaces of torch.distributed: what ranks write down for each other, without a collective."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any, NamedTuple

import torch.distributed as dist

from streamfx.torch_private.groups import group_called

LIMIT = timedelta(minutes=10)  # for the others to compile as well
SHORT, LONG = 0.002, 0.2  # seconds between two looks at what others have written
NOTHING = "nothing"  # in the place of a text that was taken back


class RanksMissingError(Exception):
    """Not all ranks have written within the time limit."""


def ranks_of(group: str) -> Sequence[int]:
    """The ranks of a group by its name, in their order; none where no other process is there to read (2.11, 2.13)."""
    if not dist.is_available() or not dist.is_initialized():
        return ()
    found = group_called(group)
    return () if dist.get_backend(found) == "fake" or dist.get_world_size(found) == 1 else dist.get_process_group_ranks(found)


class RankChangedError(Exception):
    """A rank would write something else of what ranks have agreed on; it holds what they agreed on."""


def written_by_all(text: str, group: str, subject: str = "", waits: bool = True, about: str | None = None) -> list[str]:
    """What each rank of a group writes, in their order: the n-th text of one rank goes with the n-th of the others.

    `subject` is what the text is about, as far as a rank knows before it has analysed anything. A rank that does not wait hears
    nothing of the others; its text is for those alone that write about the same subject.

    A text `about` something is not written again once all ranks have written the same of that, and no other may follow it. Texts
    go through the store that ranks met by; nothing is sent between devices (2.11, 2.13).
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
    return sha256(text.encode()).hexdigest()


class _Text(NamedTuple):
    """What a rank wrote about a subject, and how many texts about that it had begun by then."""

    subject: str
    attempt: int
    text: str

    def written(self) -> str:
        return f"{self.subject} {self.attempt}\n{self.text}"

    @classmethod
    def read(cls, written: str) -> _Text:
        head, text = written.split("\n", 1)
        subject, attempt = head.split(" ")
        return cls(subject, int(attempt), text)


@dataclass(frozen=True)
class _Board:
    """Where the ranks of a group write for each other: texts by number and rank, in a store that all of them reach.

    A rank that has failed leaves a text, which has no number: ranks that do not compile that graph never see it. One that does
    takes its own text back, and the numbers of both go on as if there had been none.
    """

    store: Any
    name: str
    ranks: tuple[int, ...]
    rank: int
    subject: str

    def exchanged(self, text: str) -> list[str]:
        """Write a text, and wait for those of the others that go with it, or for one that another rank has left."""
        number, own = self.store.add(self._counter, 1), self._begun(text)
        self._write(self._slot(number, self.rank), own)
        end, pause = time.monotonic() + LIMIT.total_seconds(), SHORT
        texts: dict[int, _Text] = {}
        while True:
            self._read_texts(number, texts)
            # looked at last: a rank leaves a text before it writes its next one
            answered = {rank for rank, item in texts.items() if item.subject == self.subject}
            left = {rank: item for rank, item in self._left_instead_of(own).items() if rank not in answered}
            if left:
                self.store.set(self._slot(number, self.rank), NOTHING)
                self.store.add(self._counter, -1)
                return [left.get(rank, text) for rank in self.ranks]
            if len(texts) == len(self.ranks):
                return [texts[rank].text for rank in self.ranks]
            if time.monotonic() > end:
                raise RanksMissingError(f"nothing from rank {self._absent(number)} within {LIMIT.total_seconds():.0f} seconds")
            time.sleep(pause)
            pause = min(LONG, 1.2 * pause)

    def leave(self, text: str) -> None:
        """Write a text for those that compile the same graph, without waiting."""
        self._write(self._place_left(self.rank, self.subject), self._begun(text))
        self.store.set(self._any_left(self.subject), "yes")

    def agreed(self, about: str) -> str | None:
        """What all ranks have written about something; None where they have not."""
        known = self._known(about)
        return self.store.get(known).decode() if self.store.check([known]) else None

    def agree(self, about: str, text: str) -> None:
        self.store.set(self._known(about), text)

    def _begun(self, text: str) -> _Text:
        """A text of this rank about the subject, and how many it has begun."""
        return _Text(self.subject, int(self.store.add(f"{self.name}/begun/{self.subject}/{self.rank}", 1)), text)

    def _read_texts(self, number: int, texts: dict[int, _Text]) -> None:
        """Fill in those with a number, once all ranks have written one: hundreds of ranks are asked for at once."""
        absent = [rank for rank in self.ranks if rank not in texts]
        if self.store.check([self._slot(number, rank) for rank in absent]):
            found = {rank: item for rank in absent if (item := self._read(self._slot(number, rank))) is not None}
            texts.update({rank: item for rank, item in found.items() if not self._is_taken_back(item, {**texts, **found})})

    def _absent(self, number: int) -> str:
        """The ranks whose text has yet to come."""
        found = {rank: item for rank in self.ranks if (item := self._read(self._slot(number, rank))) is not None}
        there = {rank for rank, item in found.items() if not self._is_taken_back(item, found)}
        return ", ".join(str(rank) for rank in self.ranks if rank not in there)

    def _left_instead_of(self, text: _Text) -> dict[int, str]:
        """By rank, what was left instead of the text that would go with one about the same subject."""
        if not self.store.check([self._any_left(text.subject)]):
            return {}
        left = {rank: self._read(self._place_left(rank, text.subject)) for rank in self.ranks}
        return {rank: item.text for rank, item in left.items() if item is not None and item.attempt >= text.attempt}

    def _is_taken_back(self, text: _Text, beside: Mapping[int, _Text]) -> bool:
        """Whether the rank that wrote a text will take it back, once it reads what another has left instead: one that has not
        written about the same beside it. Who has done that has left something since, when it had read them all.
        """
        if text.subject == self.subject:
            return False
        answered = {rank for rank, item in beside.items() if item.subject == text.subject}
        return not self._left_instead_of(text).keys() <= answered

    def _read(self, key: str) -> _Text | None:
        written = self.store.get(key).decode() if self.store.check([key]) else NOTHING
        return None if written == NOTHING else _Text.read(written)

    def _write(self, key: str, text: _Text) -> None:
        self.store.set(key, text.written())

    def _slot(self, number: int, rank: int) -> str:
        return f"{self.name}/{number}/{rank}"

    def _place_left(self, rank: int, subject: str) -> str:
        return f"{self.name}/left/{subject}/{rank}"

    def _any_left(self, subject: str) -> str:
        return f"{self.name}/left/{subject}"

    def _known(self, about: str) -> str:
        return f"{self.name}/known/{_hash(about)}/{self.rank}"

    @property
    def _counter(self) -> str:
        return f"{self.name}/count/{self.rank}"
