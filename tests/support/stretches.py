"""A replacement for Inductor with its contract: inputs have the strides and types of compilation, and no lazy conj or neg."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from streamfx.runtime import compiled_segments
from streamfx.runtime.shape_families import any_size
from streamfx.torch_private.symbolic_sizes import Shapes


def for_one_size(graph: fx.GraphModule, tensors: Sequence[Tensor]) -> Callable[..., Any]:
    """Replace `compile_for_one_size`: inputs must have the layout of `tensors`."""
    lie = [(tensor.dtype, _strides(tensor.shape, tensor.stride())) for tensor in tensors]

    def run(*given: Tensor) -> Any:
        _checked(given, lie)
        return graph(*given)

    return run


def for_sizes(graph: fx.GraphModule, like: int, shapes: Shapes) -> tuple[Callable[..., Any], Callable[[int], bool]]:
    """Replace `compile_for_sizes`: inputs must have the layout that `shapes` gives for the first argument."""

    def run(number: int, *given: Tensor) -> Any:
        _checked(given, [(like.dtype, _strides(size, stride)) for size, stride, like in shapes(number)])
        return graph(number, *given)

    return run, any_size


def _strides(size: Sequence[int], stride: Sequence[int]) -> list[int | None]:
    """The strides that code steps by; None where there is nothing to step to."""
    return [step if length > 1 else None for length, step in zip(size, stride, strict=True)]


def _checked(given: Sequence[Tensor], lie: Sequence[tuple[torch.dtype, Sequence[int | None]]]) -> None:
    for tensor, wanted in zip(given, lie, strict=True):
        assert not tensor.is_conj() and not tensor.is_neg(), "memory holds other numbers than these"
        assert (tensor.dtype, _strides(tensor.shape, tensor.stride())) == wanted, "code that is compiled for other inputs"


@contextmanager
def interpreted() -> Iterator[dict[Any, Any]]:
    """Compile and share segments of bodies with an interpreter instead of Inductor; yield the cache."""
    forms: dict[Any, Any] = {}
    with (
        mock.patch.object(compiled_segments, "_versions", forms),
        mock.patch.object(compiled_segments, "compile_for_one_size", for_one_size),
        mock.patch.object(compiled_segments, "compile_for_sizes", for_sizes),
        mock.patch.object(compiled_segments, "_warned", set()),
    ):
        yield forms
