"""Runs the program of a random decoder, and reports a failure."""

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
from tests.support.exactness import Report, fresh, gradient_errors, leaves, recorder
from tests.support.peaks import Peaks, peaks
from tests.support.stretches import interpreted


class WrongProgramError(Exception):
    """The program does not run in eager, either: the generator is wrong."""


@dataclass(frozen=True)
class Failure:
    """A decoder whose program is not exact, and the sort of its failure, which shrinking keeps."""

    decoder: Decoder
    sort: str
    message: str

    def __str__(self) -> str:
        text = program(self.decoder)
        return f"{self.message}\n\n{self.decoder}\n{'-' * 100}\n{text}{'-' * 100}"


def executed(decoder: Decoder) -> dict[str, Any]:
    """The names that the program defines, model and inputs among them."""
    module = sys.modules["random_decoder"] = ModuleType("random_decoder")  # Dynamo looks a program's functions up there
    exec(compile(program(decoder), "<random decoder>", "exec"), vars(module))
    return vars(module)


def peaks_of(decoder: Decoder) -> Peaks:
    """The peaks of a step, with streamfx and without."""
    names = executed(decoder)
    return peaks(names["model"], lambda model: names["reduce"](model(**fresh(names["inputs"]))))


def run(decoder: Decoder) -> Report:
    """Execute the program and compare with eager; raise if they differ."""
    names = executed(decoder)
    try:
        eager = leaves(names["model"](**names["inputs"]))
    except Exception as error:
        raise WrongProgramError(f"{decoder}\n{program(decoder)}") from error
    if not all(bool(item.isfinite().all()) for item in eager):
        return Report({}, recorder())  # rows that see no key, for example: nothing to compare
    with small_and_interpreted(), products_that_round_by_rows() if decoder.outputs == "logits" else nullcontext():
        try:
            report: Report = names["check"]()
        except AssertionError as error:
            if "differ from eager" in str(error) and is_decided_by_rounding(names["model"], names["inputs"], names["reduce"]):
                return Report({}, recorder())
            raise
    return report


def is_decided_by_rounding(model: nn.Module, inputs: Mapping[str, Tensor], reduce: Callable[[Any], Tensor]) -> bool:
    """Whether eager's gradients change by more than a millionth if weights change in their last digit."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 2 * torch.finfo(parameter.dtype).eps)
    one, another = (gradients_of(own, own, inputs, reduce) for own in (model, other))
    return max(gradient_errors(another, one, noise=0.0).values(), default=0.0) > 1e-6


@contextmanager
def products_that_round_by_rows() -> Iterator[None]:
    """Matrix products whose last digit depends on their number of rows, as for large matrices.

    A program that compares values of two passes over chunks needs chunks of one size in both.
    """
    library = torch.library.Library("aten", "IMPL")

    def product(left: Tensor, right: Tensor) -> Tensor:
        result = left.new_empty(left.shape[0], right.shape[1])
        torch.mm(left, right, out=result)
        return result.mul_(1 + left.shape[0] % 7 * 2.0**-52) if result.dtype == torch.float64 else result

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a kernel that replaces another one
        library.impl("mm", product, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def small_and_interpreted() -> Iterator[None]:
    """Split masks of a few rows, and defer uses of small logits, as for large ones.

    Bodies are cut, joined and shared as for Inductor, but an interpreter runs them: compilation takes seconds each.
    """
    with (
        mock.patch.object(mask_tiles, "MIN_TILE_ROWS", 2),
        mock.patch.multiple(steps, MIN_NUMEL=8, SMALL_RATIO=2),
        mock.patch.object(streamed, "_versions", {}),
        interpreted(),
    ):
        yield


def tried(decoder: Decoder) -> Report | Failure:
    """The report of a decoder, or its failure."""
    try:
        return run(decoder)
    except WrongProgramError:
        raise
    except Exception as error:
        return Failure(decoder, sort_of(error), f"{type(error).__name__}: {error}"[:2000])


def failure_of(decoder: Decoder) -> Failure | None:
    return outcome if isinstance(outcome := tried(decoder), Failure) else None


def sort_of(error: Exception) -> str:
    """The type, function and text of an error, without names of nodes and numbers."""
    text = str(error)
    where = "" if isinstance(error, AssertionError) else traceback.extract_tb(error.__traceback__)[-1].name
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
        except WrongProgramError:
            return False
        if own is not None and own.sort == failure.sort:
            found[other] = own
            return True
        return False

    return found[shrunk(failure.decoder, fails, tries)]
