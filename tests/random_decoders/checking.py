"""Runs the program of a random decoder, and says what went wrong."""

from __future__ import annotations

import copy
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from streamfx.kernels import mask_tiles
from streamfx.lazy import steps, streamed
from tests.random_decoders.calls import gradients_of
from tests.random_decoders.program import program
from tests.random_decoders.specification import Decoder, shrunk
from tests.support.exactness import Report, gradient_errors, leaves, recorder
from tests.support.stretches import interpreted


class WrongProgram(Exception):
    """The program does not even run eagerly: a mistake of the generator."""


@dataclass(frozen=True)
class Failure:
    """A decoder whose program is not exact, with the sort of failure: shrinking keeps to one sort."""

    decoder: Decoder
    sort: str
    message: str

    def __str__(self) -> str:
        text = program(self.decoder)
        return f"{self.message}\n\n{self.decoder}\n{'-' * 100}\n{text}{'-' * 100}"


def executed(decoder: Decoder) -> dict[str, Any]:
    """What the program defines: its model and inputs among them."""
    module = sys.modules["random_decoder"] = ModuleType("random_decoder")  # Dynamo looks a program's functions up there
    exec(compile(program(decoder), "<random decoder>", "exec"), vars(module))
    return vars(module)


def run(decoder: Decoder) -> Report:
    """Execute the program and compare with eager; raises where they differ."""
    names = executed(decoder)
    try:
        eager = leaves(names["model"](**names["inputs"]))
    except Exception as error:
        raise WrongProgram(f"{decoder}\n{program(decoder)}") from error
    if not all(bool(item.isfinite().all()) for item in eager):
        return Report({}, recorder())  # rows that see no key, say: nothing to compare with
    with small_and_interpreted(), products_that_round_by_rows() if decoder.outputs == "logits" else nullcontext():
        try:
            report: Report = names["check"]()
        except AssertionError as error:
            if "differ from eager" in str(error) and is_decided_by_rounding(names["model"], names["inputs"], names["reduce"]):
                return Report({}, recorder())
            raise
    return report


def is_decided_by_rounding(model: nn.Module, inputs: Mapping[str, Tensor], reduce: Callable[[Any], Tensor]) -> bool:
    """Whether eager's own gradients move, by more than a millionth, where weights move by their last digit: by chance."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 2 * torch.finfo(parameter.dtype).eps)
    one, another = (gradients_of(own, own, inputs, reduce) for own in (model, other))
    return max(gradient_errors(another, one, noise=0.0).values(), default=0.0) > 1e-6


@contextmanager
def products_that_round_by_rows() -> Iterator[None]:
    """Products of matrices whose last digit depends on how many rows they have, as those of large matrices do.

    Where a value of one pass over chunks is compared with a value of another, both have to come from chunks of one size.
    """
    library = torch.library.Library("aten", "IMPL")

    def product(left: Tensor, right: Tensor) -> Tensor:
        made = left.new_empty(left.shape[0], right.shape[1])
        torch.mm(left, right, out=made)
        return made.mul_(1 + left.shape[0] % 7 * 2.0**-52) if made.dtype == torch.float64 else made

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that an operator has another kernel now is what is wanted
        library.impl("mm", product, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def small_and_interpreted() -> Iterator[None]:
    """Masks of a few rows are taken apart as those of long chunks are, and uses of small logits wait as those of large ones do.

    Bodies are cut, joined and shared as for Inductor, whose place an interpreter takes: what it would compile in seconds each
    runs at once.
    """
    with (
        mock.patch.object(mask_tiles, "MIN_TILE_ROWS", 2),
        mock.patch.multiple(steps, MIN_NUMEL=8, SMALL_RATIO=2),
        mock.patch.object(streamed, "_versions", {}),
        interpreted(),
    ):
        yield


def failure_of(decoder: Decoder) -> Failure | None:
    """What is wrong with a decoder; None if nothing is."""
    try:
        run(decoder)
    except WrongProgram:
        raise
    except Exception as error:
        return Failure(decoder, sort_of(error), f"{type(error).__name__}: {error}"[:2000])
    return None


def sort_of(error: Exception) -> str:
    """Errors are alike where they have the same type and come from the same line, whatever names and numbers they mention."""
    text = str(error)
    where = ""
    if not isinstance(error, AssertionError):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.name}"
    found = re.search(r"analysis failed: \['(\w+: [^']*)", text)
    if found is None and "differ from eager" in text:
        return "not exact"
    words = found.group(1) if found else text.split("\n")[0]
    return f"{type(error).__name__} {where} {re.sub(r'[0-9]+|_[a-z0-9_]+', '', words)[:80]}"


def smallest(failure: Failure, tries: int = 150) -> Failure:
    """The simplest failure of the same sort."""
    found = {failure.decoder: failure}

    def fails(other: Decoder) -> bool:
        try:
            own = failure_of(other)
        except WrongProgram:
            return False
        if own is not None and own.sort == failure.sort:
            found[other] = own
            return True
        return False

    return found[shrunk(failure.decoder, fails, tries)]
