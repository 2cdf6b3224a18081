"""A deferred tensor behaves as the dense one does: whatever reads it, views it, writes into it or saves it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.deferred import IDS, MODES, Compiled, assert_behaves, assert_same
from tests.support.heads import VOCABULARY, decoder


@pytest.fixture(scope="module")
def compilations() -> dict[str, Compiled]:
    return {mode: Compiled(decoder(), mode) for mode in MODES}


def changed(tensor: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    change(tensor)
    return tensor


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "metadata": lambda x: (x.shape, x.size(1), x.ndim, x.numel(), x.dtype, x.layout, x.is_floating_point(), len(x)),
    "strides": lambda x: (x.stride(), x[:, -1].stride(), x[:, -1].storage_offset(), x[:, -1].is_contiguous()),
    "argmax": lambda x: x.argmax(-1),
    "last row": lambda x: x[:, -1],
    "last rows": lambda x: x[:, -3:].neg(),
    "every third row": lambda x: x[:, ::3] > 0,
    "one number": lambda x: x[0, 0, 0].item(),
    "to a list": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().numpy(),
    "numpy of what needs a gradient": lambda x: x.numpy(),
    "array": lambda x: np.asarray(x.detach()),
    "dlpack": lambda x: torch.utils.dlpack.from_dlpack(x.detach()),
    "text": lambda x: repr(x.detach()),
    "format": lambda x: f"{x[0, 0, 0].detach():.4f}",
    "iteration": lambda x: [row.sum() for row in x],
    "equal": lambda x: (torch.equal(x, x), bool((x == x).all())),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data.sum(),
    "same device": lambda x: (x.cpu() is x, x.to(x.dtype) is x, x.contiguous() is x),
    "view": lambda x: x.view(-1, VOCABULARY)[3],
    "reshape": lambda x: x.reshape(-1, VOCABULARY)[::2],
    "transposes": lambda x: (x.mT, x.permute(2, 0, 1)[3:5], x[0].T[3]),
    "shifted": lambda x: x[..., :-1, :].contiguous().view(-1, VOCABULARY),
    "split": lambda x: (x.split(3, 1)[2] * 2, x.unbind(0)[1], x.chunk(4, 1)[3]),
    "mask": lambda x: x[x > 0],
    "gather": lambda x: x.log_softmax(-1).gather(-1, IDS),
    "topk": lambda x: x.topk(3).values,
    "stack": lambda x: torch.stack([x, x * 2]),
    "cross entropy": lambda x: F.cross_entropy(x.transpose(1, 2), IDS[..., 0]),
    "einsum": lambda x: torch.einsum("btv,btv->bt", x, x),
    "vmap": lambda x: torch.vmap(torch.sum)(x),
    "as strided": lambda x: x.as_strided((2, 3), (440, 1), 40) * 1,
    "expand": lambda x: x[:, -1:].expand(2, 5, VOCABULARY) + 1,
    "clone": lambda x: x.clone(),
    "foreach": lambda x: torch._foreach_mul([x, x], 2.0)[0],
    "write": lambda x: changed(x, lambda x: x.add_(1)),
    "write a row": lambda x: changed(x, lambda x: x[:, 0].mul_(3)),
    "set an item": lambda x: changed(x, lambda x: x.__setitem__((slice(None), -1), 0.0)),
    "write after a row was read": lambda x: (lambda row, sum: (x.mul_(2), row + sum)[1])(x[:, -1], x[:, -1].sum()),
    "write into a row that was read": lambda x: (lambda row: (row.sum(), row.mul_(2), x.sum()))(x[:, -1]),
    "transpose in place": lambda x: changed(x * 1, lambda x: x.transpose_(0, 2)),
    "transpose it in place": lambda x: (lambda x, row: (x.transpose_(0, 2), x.add_(1), row * 1)[2])(x.detach(), x.detach()[0]),
    "detach in place": lambda x: (x.detach_().requires_grad, x.sum()),
    "other data": lambda x: changed(x.detach(), lambda x: setattr(x, "data", torch.ones_like(x))),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_it_is_that_of_the_dense_one(compilations: dict[str, Compiled], name: str, mode: str) -> None:
    with MODES[mode]():
        assert_behaves(compilations[mode], FUNCTIONS[name])


CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda x: x.float(),
    "to bfloat16": lambda x: x.to(torch.bfloat16)[:, -1],
    "half": lambda x: x.half(),
    "a slice of a cast": lambda x: x.float()[:, -1, :5],
    "softmax in another type": lambda x: F.softmax(x, -1, dtype=torch.float32),
    "a cast before a write": lambda x: (lambda cast: (x.mul_(2), cast)[1])(x.float()),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASTS)
def test_casts(compilations: dict[str, Compiled], name: str, mode: str) -> None:
    with MODES[mode]():
        assert_behaves(compilations[mode], CASTS[name], tolerance=5e-3)


@pytest.mark.parametrize("trip", ["save", "pickle", "copy"])
def test_saved_it_is_a_plain_tensor(compilations: dict[str, Compiled], trip: str) -> None:
    with torch.no_grad():
        compiled = compilations["no_grad"]
        logits = compiled.deferred()
        if trip == "save":
            file = io.BytesIO()
            torch.save({"logits": logits}, file)
            file.seek(0)
            again = torch.load(file)["logits"]
        else:
            again = pickle.loads(pickle.dumps(logits)) if trip == "pickle" else copy.deepcopy(logits)
        assert type(again) is Tensor
        assert_same(again, compiled.dense())
