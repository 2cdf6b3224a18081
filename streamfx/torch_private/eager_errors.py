"""The error that an operator raises in eager mode, for an operator that failed while a call was traced.

PyTorch traces on *fake tensors*, which have shapes and no data. Their operators raise errors of the types of eager mode, often
with other texts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.utils import run_node
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from streamfx.torch_private.symbolic_sizes import size_hint

MAX_BYTES = 2**30  # of an operand: an operator that succeeds after all allocates about as much
DISPATCH = "__torch_dispatch__"  # the method in which a fake tensor's operator fails; its locals: func, args, kwargs
TRACER_LOG = "torch._subclasses.fake_tensor"
TRACER_MESSAGE = "failed while attempting to run meta for"


def eager_error_of(error: Exception) -> Exception | None:
    """Return the error that eager mode raises for the operator whose tracing raised `error` (2.11, 2.13).

    The operator runs on zeros: one element per tensor, expanded to its shape. Eager operators check shapes and dtypes before they
    allocate. None if no operator failed, if it writes in place, if an operand is too large or its shape depends on data, or if
    the operator runs.
    """
    call = _failed_operator(error)
    if call is None:
        return None
    operator, args, kwargs = call
    fake_tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, FakeTensor)]
    is_mutable = isinstance(operator, torch._ops.OpOverload) and operator._schema.is_mutable
    if is_mutable or not fake_tensors or not all(map(_is_small, fake_tensors)):
        return None
    try:
        args, kwargs = tree_map_only((FakeTensor, torch.SymInt), _real_value, (args, kwargs))
        with torch.no_grad(), torch.autocast(fake_tensors[0].device.type, enabled=False):
            operator(*args, **kwargs)
    except torch.OutOfMemoryError:
        return None
    except Exception as eager_error:
        eager_error.__context__ = None
        return eager_error.with_traceback(error.__traceback__)
    return None


def _failed_operator(error: Exception) -> tuple[Any, Any, Any] | None:
    """Return the operator of PyTorch in whose tracing an error was raised, with its arguments; None if there is none.

    It is the outermost one: tracing an operator may run others. If a function checks its arguments before it calls any operator,
    its text may have symbols for dynamic sizes, so it is the function of Dynamo's node.
    """
    function, trace = None, error.__traceback__
    while trace is not None:
        names, code, trace = trace.tb_frame.f_locals, trace.tb_frame.f_code, trace.tb_next
        if code.co_name == DISPATCH and isinstance(names.get("self"), FakeTensorMode):
            return names["func"], names["args"], names.get("kwargs") or {}
        if code is run_node.__code__ and names["node"].op == "call_function":
            function = names["node"].target, names["args"], names["kwargs"]
    return function


def _is_small(value: Any) -> bool:
    """Return whether a fake tensor has a known shape, and at most `MAX_BYTES`."""
    is_known = all(size.node.hint is not None for size in value.shape if isinstance(size, torch.SymInt))
    return is_known and value.element_size() * size_hint(value.numel()) <= MAX_BYTES


def _real_value(value: Any) -> Any:
    """Return zeros with the shape, dtype and device of a fake tensor, of one element in memory; an integer for a `SymInt`."""
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    shape = [size_hint(size) for size in value.shape]
    return torch.zeros((), dtype=value.dtype, device=value.device).expand(shape)


@contextmanager
def without_tracer_log() -> Iterator[None]:
    """Context manager: PyTorch does not log the traceback of an operator that fails while traced (2.11, 2.13)."""

    def is_other(record: logging.LogRecord) -> bool:
        """Return whether a record is not such a traceback."""
        return not str(record.msg).startswith(TRACER_MESSAGE)

    logger = logging.getLogger(TRACER_LOG)
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
