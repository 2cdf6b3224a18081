"""Find the document boundaries of a packed sequence once per call instead of once per layer.

transformers' flash attention reads `position_ids` in each layer if the batch has one row, to find where positions
restart. This branch on data breaks the graph, so each layer would be split and the values at the breaks would be saved
in full. While a model is enabled, the boundaries are computed from the arguments of the call: from `position_ids`, or,
without these, one document. The graph asserts that a layer would find the same boundaries. They are cumulative: for documents of
3 and 5 tokens, [0, 3, 8].

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
from streamfx.torch_private.dynamo import mark_length_dynamic

ONE_DOCUMENT, SAME_FOR_KEYS = False, True
Boundaries: TypeAlias = "bool | Tensor | None"
"""A tensor: the cumulative document boundaries of the only row. None: unknown.

ONE_DOCUMENT: each row is one document. SAME_FOR_KEYS: the call passes boundaries, which are equal for queries and keys.
"""

FLASH_MODULE = "transformers.modeling_flash_attention_utils"
IS_PACKED, PREPARE, ENDS = "_is_packed_sequence", "_prepare_from_posids", "prepare_fa_kwargs_from_position_ids"
CAST = "fa_peft_integration_check"
CU_SEQLENS_Q, CU_SEQLENS_K = "cu_seq_lens_q", "cu_seq_lens_k"
IMPLEMENTATION = "_attn_implementation"
BOUNDARIES_DIFFER = (
    "the model computes its own position_ids, which have other document boundaries than the arguments of the call: "
    "pass position_ids, or cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k"
)


class _TracedCall:
    """The document boundaries of the call that is being traced; `is_known` is False outside of such a call."""

    boundaries: Boundaries = None
    is_known = False


_traced_call = _TracedCall()
_originals: list[dict[str, Any]] = []  # transformers' own functions, one entry per enabled module


def needs_boundaries(module: nn.Module) -> bool:
    """Return whether layers of a module may look for document boundaries: it uses transformers' flash attention."""
    names = vars(sys.modules[FLASH_MODULE]) if FLASH_MODULE in sys.modules else {}
    configs = (getattr(submodule, "config", None) for submodule in module.modules())
    return names.keys() >= {IS_PACKED, PREPARE, ENDS, CAST} and any(
        "flash" in str(getattr(config, IMPLEMENTATION, None)) for config in configs
    )


def replace_functions() -> None:
    """Replace three of transformers' functions by those below. Without `with_boundaries` around a call, they do the same.

    Call this once for each enabled module, and `restore_functions` when it is disabled.
    """
    names = vars(sys.modules[FLASH_MODULE])
    _originals.append(_originals[0] if _originals else {name: names[name] for name in (IS_PACKED, PREPARE, ENDS, CAST)})
    names.update({IS_PACKED: _is_packed, PREPARE: _prepare_heads, CAST: _cast_heads})


def restore_functions() -> None:
    """Undo one `replace_functions`; the last call restores transformers' functions."""
    originals = _originals.pop()
    if not _originals:
        vars(sys.modules[FLASH_MODULE]).update(originals)


def with_boundaries(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module's call with another first argument, the document boundaries, which its layers then use in a trace."""

    def with_known_boundaries(boundaries: Boundaries, *args: Any, **kwargs: Any) -> Any:
        """Run the function; transformers' replaced functions read the boundaries from `_traced_call`."""
        _traced_call.boundaries, _traced_call.is_known = boundaries, True
        if boundaries is SAME_FOR_KEYS:
            kwargs[CU_SEQLENS_K] = kwargs[CU_SEQLENS_Q].clone()
        try:
            return function(*args, **kwargs)
        finally:
            _traced_call.boundaries, _traced_call.is_known = None, False

    return with_known_boundaries


def find_boundaries(args: Sequence[Any], kwargs: dict[str, Any]) -> Boundaries:
    """Return the document boundaries that the arguments of a call say, as a layer would find them (see `Boundaries`).

    If the call passes equal boundaries for queries and keys, those for keys are removed from `kwargs`, and the result is
    `SAME_FOR_KEYS`: the graph copies them.
    """
    with torch.no_grad():
        if _are_equal(kwargs.get(CU_SEQLENS_Q), kwargs.get(CU_SEQLENS_K)):
            del kwargs[CU_SEQLENS_K]
            return SAME_FOR_KEYS
        return (
            _boundaries_by_positions(kwargs["position_ids"])
            if kwargs.get("position_ids") is not None
            else _boundaries_by_count(args)
        )


def _are_equal(value: Any, other_value: Any) -> bool:
    """Return whether both values are tensors with equal elements."""
    return (
        isinstance(value, Tensor)
        and isinstance(other_value, Tensor)
        and (value is other_value or torch.equal(value, other_value))
    )


def _boundaries_by_count(args: Sequence[Any]) -> Boundaries:
    """Return the boundaries of a call without named `position_ids`: one document per row.

    None (unknown) if there are several positional arguments, which may contain the positions.
    """
    return ONE_DOCUMENT if len(args) <= 1 else None


def _boundaries_by_positions(positions: Any) -> Boundaries:
    """Return the boundaries at which `position_ids` restart: [[0, 1, 2, 0, 1]] -> [0, 3, 5].

    ONE_DOCUMENT if they do not restart within a row, None (unknown) if they are not a matrix of positions.
    """
    if not isinstance(positions, Tensor) or positions.dim() != 2 or not _originals:
        return None
    if not bool(_originals[0][IS_PACKED](positions, positions.shape[0])):
        return ONE_DOCUMENT
    (boundaries, _), _ = _originals[0][ENDS](positions)
    return mark_length_dynamic(boundaries)


# -- replacements of transformers' functions


def _is_packed(position_ids: Any, batch_size: Any) -> Any:
    """In place of `_is_packed_sequence`: return whether a row has several documents.

    In a trace, the known boundaries answer this without a branch on data; the graph asserts that a row with one document has one.
    """
    is_packed, boundaries = _originals[0][IS_PACKED](position_ids, batch_size), _traced_call.boundaries
    if (
        not isinstance(is_packed, Tensor)
        or not torch.compiler.is_dynamo_compiling()
        or boundaries is None
        or boundaries is SAME_FOR_KEYS
    ):
        return is_packed
    if boundaries is ONE_DOCUMENT:
        assert_true(~is_packed, BOUNDARIES_DIFFER)
    return boundaries is not ONE_DOCUMENT


def _prepare_heads(query: Tensor, key: Tensor, value: Tensor, position_ids: Tensor) -> Any:
    """In place of `_prepare_from_posids`: return query, key and value with batch and rows flattened, boundaries, and lengths.

    In a trace, the boundaries are the known ones, and the graph asserts that the positions restart there. The boundaries and the
    maximum lengths of documents are pairs, for queries and keys.
    """
    boundaries = _traced_call.boundaries
    if not isinstance(boundaries, Tensor) or not torch.compiler.is_dynamo_compiling():
        return _originals[0][PREPARE](query, key, value, position_ids)
    rows = torch.arange(position_ids.numel(), device=boundaries.device)
    is_start = torch.bucketize(rows, boundaries, right=True) != torch.bucketize(rows, boundaries)
    assert_true((is_start == (position_ids == position_ids.min()).flatten()).all(), BOUNDARIES_DIFFER)
    heads = tuple(tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (query, key, value))
    longest = heads[0].shape[0]  # an upper bound of the document lengths is enough
    return (
        *heads,
        (boundaries, boundaries.clone()),  # a clone: Dynamo (2.13) cannot trace one tensor passed twice
        (longest, longest),
    )


def _cast_heads(query: Tensor, key: Tensor, value: Tensor, target_dtype: torch.dtype | None = None) -> Any:
    """In place of `fa_peft_integration_check`: cast heads in single precision to `target_dtype`, in a trace without a warning."""
    if not (_traced_call.is_known and torch.compiler.is_dynamo_compiling()):
        return _originals[0][CAST](query, key, value, target_dtype)
    is_wide = target_dtype is not None and query.dtype == torch.float32
    return tuple(tensor.to(target_dtype) if is_wide else tensor for tensor in (query, key, value))
