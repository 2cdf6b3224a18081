"""Where do documents begin in a row of several? Looked up once for a call, and not in each layer.

transformers' flash attention asks the numbers of `position_ids` in each layer, where a batch has one row: do they begin anew, and
where? A branch on data cuts the graph, so that each layer would be pieces of its own, with what crosses between them kept in
full. While a model is enabled, the call is asked: its `position_ids`, or none, which is one document. In the graph it is asserted
that a layer would have found the same.

Collators that say where documents end say it twice, for rows and for keys. Dynamo (2.13) makes no graph of one tensor in two
places, and of two nothing says that they are equal: one is given to the graph, which copies it. Heads in single precision are
cast without the warning that transformers logs, which would cut the graph as well.
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
"""False: each row is one document. A tensor: where documents of the only row begin, and where it ends. None: not known.

True: the call says where they end, and ends of keys are those of rows.
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
    """What is known of the call that is being traced."""

    found: Found = None
    is_told = False


_call = _TracedCall()
_before: list[dict[str, Any]] = []  # transformers' own functions, once for each enabled module


def asks(module: nn.Module) -> bool:
    """Whether layers of a module may ask."""
    known = vars(sys.modules[ASKS]) if ASKS in sys.modules else {}
    configs = (getattr(part, "config", None) for part in module.modules())
    return known.keys() >= {IS_PACKED, PREPARE, ENDS, CAST} and any(
        "flash" in str(getattr(config, USES, None)) for config in configs
    )


def listen() -> None:
    """Answer in the place of transformers; what is called otherwise than by `told` asks as before."""
    names = vars(sys.modules[ASKS])
    _before.append(_before[0] if _before else {name: names[name] for name in (IS_PACKED, PREPARE, ENDS, CAST)})
    names.update({IS_PACKED: _is_packed, PREPARE: _prepared, CAST: _cast})


def forget() -> None:
    """Undo one `listen`."""
    before = _before.pop()
    if not _before:
        vars(sys.modules[ASKS]).update(before)


def told(function: Callable[..., Any]) -> Callable[..., Any]:
    """A call that is traced with what was found, which comes first."""

    def call(found: Found, *args: Any, **kwargs: Any) -> Any:
        _call.found, _call.is_told = found, True
        if found is True:
            kwargs[OF_KEYS] = kwargs[OF_ROWS].clone()
        try:
            return function(*args, **kwargs)
        finally:
            _call.found, _call.is_told = None, False

    return call


def found_in(args: Sequence[Any], kwargs: dict[str, Any]) -> Found:
    """What a call's arguments say, as a layer would read it; what they say twice is taken out of them once."""
    with torch.no_grad():
        if _are_equal(kwargs.get(OF_ROWS), kwargs.get(OF_KEYS)):
            del kwargs[OF_KEYS]
            return True
        return _by_positions(kwargs["position_ids"]) if kwargs.get("position_ids") is not None else _without(args)


def _are_equal(one: Any, other: Any) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and (one is other or torch.equal(one, other))


def _without(args: Sequence[Any]) -> Found:
    """What a call without positions says: they may be among arguments that are not named."""
    return False if len(args) <= 1 else None


def _by_positions(positions: Any) -> Found:
    if not isinstance(positions, Tensor) or positions.dim() != 2 or not _before:
        return None
    if not bool(_before[0][IS_PACKED](positions, positions.shape[0])):
        return False
    (ends, _), _ = _before[0][ENDS](positions)
    return of_any_length(ends)


# -- in the place of transformers' functions


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
    longest = heads[0].shape[0]  # none is longer, and more is not asked
    return *heads, (ends, ends.clone()), (longest, longest)  # of one tensor in two places Dynamo (2.13) makes no graph


def _cast(query: Tensor, key: Tensor, value: Tensor, target_dtype: torch.dtype | None = None) -> Any:
    if not (_call.is_told and torch.compiler.is_dynamo_compiling()):
        return _before[0][CAST](query, key, value, target_dtype)
    is_wide = target_dtype is not None and query.dtype == torch.float32
    return tuple(item.to(target_dtype) if is_wide else item for item in (query, key, value))
