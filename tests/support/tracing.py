"""A function through AOTAutograd without Dynamo: tracing for tests that need thousands of graphs."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from functorch.compile import aot_function
from torch import Tensor

from streamfx.ir.facts import Facts
from streamfx.options import resolve_options
from streamfx.passes.ops.rules import DECOMPOSITIONS
from tests.support.exactness import (
    TOLERANCE,
    Recorded,
    Recorder,
    assert_small,
    check_streamed,
    compare_replayed,
    gradient_errors,
    relative_error,
)


def traced(
    function: Callable[..., Tensor], tensors: Sequence[Tensor], scale: float = 1.0, **options: Any
) -> tuple[Recorded, Tensor]:
    """Run `function`, forward and backward, through the backend; return the recording and the result.

    `scale` is what the result is multiplied by before its backward.
    """
    recorded = Recorded(None, resolve_options({"outputs": "dense", **options}))  # type: ignore[arg-type]
    compiled = aot_function(
        function,
        fw_compiler=recorded.run_forward,
        bw_compiler=recorded.run,
        partition_fn=recorded.partition,
        decompositions=DECOMPOSITIONS,
    )
    result: Tensor = compiled(*tensors)
    (scale * result if scale != 1.0 else result).backward()
    return recorded, result.detach()


def compare_function(
    function: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    chunk_sizes: Iterable[int],
    tolerance: float = TOLERANCE,
    streams: bool | None = None,
    attention: set[str] | None = None,
) -> Facts:
    """Assert that a function of tensors to a number, rewritten for each chunk size, has eager's result and gradients."""
    first, *others = chunk_sizes
    truth = function(*tensors)
    truth.backward()
    wanted = take_gradients(tensors)
    recorded, actual = traced(function, tensors, chunk_size=first, loss_chunk_size=first)
    found = gradient_errors(take_gradients(tensors), wanted) | {"result": relative_error(actual, truth.detach())}
    assert_small(found, tolerance, f"chunks of {first}")
    check_streamed(recorded.facts, streams, attention)
    for size in others:
        compare_replayed(Recorder(recorded.options, [recorded]), size, tolerance, {})
    return recorded.facts[-1]


def take_gradients(tensors: Sequence[Tensor]) -> dict[str, Tensor | None]:
    """The gradients by position, cleared."""
    found: dict[str, Tensor | None] = {}
    for position, tensor in enumerate(tensors):
        if tensor.requires_grad:
            found[str(position)] = tensor.grad
            tensor.grad = None
    return found
