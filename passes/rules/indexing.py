"""Look-ups: rows follow the index; the table that is looked into is needed whole along the indexed axis."""

from __future__ import annotations

import torch

from streamfx.ir.signature import LetterDim, Signature
from streamfx.passes.rules.registry import Call, rule

aten = torch.ops.aten


@rule(aten.embedding.default)
def embedding(call: Call) -> Signature:
    rank = len(call.shapes[1])
    index = tuple((i,) for i in range(rank))
    vocabulary, width = (rank,), (rank + 1,)
    return Signature(((vocabulary, width), index), ((*index, width),), whole=frozenset(vocabulary))


@rule(aten.embedding_dense_backward.default)
def embedding_dense_backward(call: Call) -> Signature | None:
    """Rows of the gradient are added into a table of their own: summed over all positions."""
    if call.arguments()["scale_grad_by_freq"]:
        return None
    rank = len(call.shapes[1])
    index = tuple((i,) for i in range(rank))
    vocabulary, width = (rank,), (rank + 1,)
    return Signature(((*index, width), index), ((vocabulary, width),), whole=frozenset(vocabulary))


@rule(aten.gather.default)
def gather(call: Call) -> Signature | None:
    """The indexed dimension is needed whole; all others must run along together."""
    rank, dim = len(call.shape), call.arguments()["dim"]
    if not rank:
        return None
    dim %= rank
    source, index = call.shapes
    if any(source[i] != index[i] for i in range(rank) if i != dim):
        return None
    letters = tuple((i,) for i in range(rank))
    looked = (*letters[:dim], (rank,), *letters[dim + 1 :])
    return Signature((looked, letters), (letters,), whole=frozenset({rank}))


@rule(aten.scatter_add.default, aten.scatter.src, aten.scatter.value)
def scatter(call: Call) -> Signature | None:
    """The mirror of `gather`: the written dimension is needed whole on the target's side."""
    rank, dim = len(call.shape), call.arguments()["dim"]
    if not rank:
        return None
    dim %= rank
    if any(shape[i] != call.shape[i] for shape in call.shapes for i in range(rank) if i != dim):
        return None
    letters = tuple((i,) for i in range(rank))
    index = (*letters[:dim], (rank,), *letters[dim + 1 :])
    return Signature((letters, *(index,) * (len(call.operands) - 1)), (letters,), whole=frozenset({dim, rank}))


@rule(aten.index_select.default)
def index_select(call: Call) -> Signature | None:
    rank = len(call.shapes[0])
    if not rank:
        return None
    dim = call.arguments()["dim"] % rank
    letters = tuple((i,) for i in range(rank))
    chosen = (rank,)
    result = (*letters[:dim], chosen, *letters[dim + 1 :])
    index = (chosen,) if call.shapes[1] else ()
    return Signature((letters, index), (result,), whole=frozenset({dim}))


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(call: Call) -> Signature | None:
    """`x[i, j, :]`: index tensors are broadcast together, and the dimensions they look into are needed whole."""
    indices = call.arguments()["indices"]
    source = call.shapes[0]
    looked = [dim for dim, item in enumerate(indices) if item is not None]
    tensors = call.operands[1:]
    if len(tensors) != len(looked) or any(tensor.meta["val"].dtype == torch.bool for tensor in tensors):
        return None
    rank = max(len(shape) for shape in call.shapes[1:])
    together = looked == list(range(looked[0], looked[-1] + 1))
    first = looked[0] if together else 0
    result_size = len(call.shape)
    result = tuple((i,) if size != 1 else () for i, size in enumerate(call.shape))
    broadcast_dims = result[first : first + rank]
    kept = iter(result[:first] + result[first + rank :])
    letter = result_size
    operand: list[LetterDim] = []
    whole = set()
    for dim in range(len(source)):
        if dim in looked:
            operand.append((letter,))
            whole.add(letter)
            letter += 1
        else:
            operand.append(next(kept))
    shapes = tuple(
        tuple(broadcast_dims[rank - len(shape) + i] if size != 1 else () for i, size in enumerate(shape))
        for shape in call.shapes[1:]
    )
    return Signature((tuple(operand), *shapes), (result,), whole=frozenset(whole))
