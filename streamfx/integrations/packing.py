"""Find the document boundaries of a packed sequence once per call instead of once per layer.

transformers' flash attention reads `position_ids` in each layer if the batch has one row, to find where positions
restart. This branch on data breaks the graph, so each layer would be split and the values at the breaks would be saved
in full. While a model is enabled, the boundaries are computed from the arguments of the call: from `position_ids`, or,
without these, one document. The graph asserts that a layer would find the same boundaries.

Collators that pass boundaries pass them twice, for query and key positions. Dynamo (2.13) cannot trace one tensor
passed twice, and cannot know that two tensors are equal: the graph gets one and copies it. Heads in single precision
are cast without transformers' warning, which would also break the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from streamfx.torch_private import assert_true
from streamfx.torch_private.dynamo import of_any_length

Found: TypeAlias = "bool | Tensor | None"
"""False: each row is one document. A tensor: the cumulative document boundaries of the only row. None: unknown.

True: the call passes the boundaries, and they are the same for query and key positions.
"""

ASKS = "transformers.modeling_flash_attention_utils"
IS_PACKED, PREPARE, ENDS = "_is_packed_sequence", "_prepare_from_posids", "prepare_fa_kwargs_from_position_ids"
CAST = "fa_peft_integration_check"
OF_ROWS, OF_KEYS = "cu_seq_lens_q", "cu_seq_lens_k"
USES = "_attn_implementation"
OTHERWISE = (
    "the model made position_ids of its own, by which documents begin elsewhere than by those that the call was given: "
    "give the call the position_ids, or cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k"
)


class _TracedCall:
    """The document boundaries of the call that is being traced."""

    found: Found = None
    is_known = False


_call = _TracedCall()
_before: list[dict[str, Any]] = []  # transformers' own functions, one entry per enabled module


def asks(module: nn.Module) -> bool:
    """Return whether layers of a module may look for boundaries."""
    known = vars(sys.modules[ASKS]) if ASKS in sys.modules else {}
    configs = (getattr(part, "config", None) for part in module.modules())
    return known.keys() >= {IS_PACKED, PREPARE, ENDS, CAST} and any(
        "flash" in str(getattr(config, USES, None)) for config in configs
    )


def listen() -> None:
    """Replace transformers' functions. Calls that are not wrapped keep the original behavior."""
    names = vars(sys.modules[ASKS])
    _before.append(_before[0] if _before else {name: names[name] for name in (IS_PACKED, PREPARE, ENDS, CAST)})
    names.update({IS_PACKED: _is_packed, PREPARE: _prepared, CAST: _cast})


def forget() -> None:
    """Undo one `listen`."""
    before = _before.pop()
    if not _before:
        vars(sys.modules[ASKS]).update(before)


def told(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a call so that it is traced with the boundaries, its first argument."""

    def call(found: Found, *args: Any, **kwargs: Any) -> Any:
        _call.found, _call.is_known = found, True
        if found is True:
            kwargs[OF_KEYS] = kwargs[OF_ROWS].clone()
        try:
            return function(*args, **kwargs)
        finally:
            _call.found, _call.is_known = None, False

    return call


def found_in(args: Sequence[Any], kwargs: dict[str, Any]) -> Found:
    """Find the boundaries in a call's arguments as a layer would, and remove a duplicate from them."""
    with torch.no_grad():
        if _are_equal(kwargs.get(OF_ROWS), kwargs.get(OF_KEYS)):
            del kwargs[OF_KEYS]
            return True
        return _by_positions(kwargs["position_ids"]) if kwargs.get("position_ids") is not None else _by_count(args)


def _are_equal(one: Any, other: Any) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and (one is other or torch.equal(one, other))


def _by_count(args: Sequence[Any]) -> Found:
    """Return the boundaries for a call without named positions: positional arguments may contain them."""
    return False if len(args) <= 1 else None


def _by_positions(positions: Any) -> Found:
    if not isinstance(positions, Tensor) or positions.dim() != 2 or not _before:
        return None
    if not bool(_before[0][IS_PACKED](positions, positions.shape[0])):
        return False
    (ends, _), _ = _before[0][ENDS](positions)
    return of_any_length(ends)


# -- replacements of transformers' functions


def _is_packed(position_ids: Any, batch_size: Any) -> Any:
    is_packed, found = _before[0][IS_PACKED](position_ids, batch_size), _call.found
    if not isinstance(is_packed, Tensor) or not torch.compiler.is_dynamo_compiling() or found is None or found is True:
        return is_packed
    if found is False:
        assert_true(~is_packed, OTHERWISE)
    return found is not False


def _prepared(query: Tensor, key: Tensor, value: Tensor, position_ids: Tensor) -> Any:
    ends = _call.found
    if not isinstance(ends, Tensor) or not torch.compiler.is_dynamo_compiling():
        return _before[0][PREPARE](query, key, value, position_ids)
    rows = torch.arange(position_ids.numel(), device=ends.device)
    begins = torch.bucketize(rows, ends, right=True) != torch.bucketize(rows, ends)
    assert_true((begins == (position_ids == position_ids.min()).flatten()).all(), OTHERWISE)
    heads = tuple(item.reshape(-1, *item.shape[-2:]) for item in (query, key, value))
    longest = heads[0].shape[0]  # an upper bound of the document lengths is enough
    return *heads, (ends, ends.clone()), (longest, longest)  # a clone: Dynamo (2.13) cannot trace one tensor passed twice


def _cast(query: Tensor, key: Tensor, value: Tensor, target_dtype: torch.dtype | None = None) -> Any:
    if not (_call.is_known and torch.compiler.is_dynamo_compiling()):
        return _before[0][CAST](query, key, value, target_dtype)
    is_wide = target_dtype is not None and query.dtype == torch.float32
    return tuple(item.to(target_dtype) if is_wide else item for item in (query, key, value))
