"""What kernels of attention take beside their results: each that a program runs is counted, and takes what is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import streamfx
from streamfx.cost import meter, workspaces
from streamfx.kernels import cuda_attention, sdpa
from streamfx.kernels.device_kinds import supposed
from streamfx.tools.planner.devices import device_called
from streamfx.torch_private import FakeTensorMode, OpOverload
from streamfx.torch_private.allocations import allocations
from tests.support.spread import spread
from tests.test_plan import TINY

THREAD = 2 << 20  # bytes that a CPU's kernel takes for a thread, at most (docs/planner.md)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Any]]:
    """Operators of attention that a meter meets: those of outer graphs, those of bodies, and those inside of others."""
    found, count = set[Any](), meter._work_of

    def noted(func: Any, *given: Any) -> Any:
        if isinstance(func, OpOverload) and "attention" in func.name():
            found.add(func)
        return count(func, *given)

    monkeypatch.setattr(meter, "_work_of", noted)
    meter._followed.cache_clear()
    yield found
    meter._followed.cache_clear()


CASES = [
    (context, device, dtype) for context in (2, 1) for device in ("H100", "A100", "here") for dtype in ("bfloat16", "float32")
]


@pytest.mark.parametrize(("context", "device", "dtype"), spread(CASES, 5))
def test_every_attention_of_a_program_is_counted(context: int, device: str, dtype: str, seen: set[Any]) -> None:
    options = {"save": "inputs", "chunk_size": 128, "loss_chunk_size": 128}
    given: dict[str, Any] = {"device": device, "dtype": dtype, "world": context, "context": context, "shard": "ddp"}
    streamfx.plan({**TINY, "num_hidden_layers": 1}, seq=512, baselines=False, options=options, **given)
    assert (sdpa.ATTENTION_BACKWARD in seen) == (context > 1)
    assert any(func.namespace == "aten" and "backward" in func.name() for func in seen)
    assert seen <= {*workspaces.WORKSPACES, *workspaces.FOLLOWED}


def operands(heads: int, groups: int, rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """A gradient, queries, keys and values that lie as rows that ranks have exchanged, a result and log-sum-exps."""
    query, key, value = (torch.zeros(rows, 1, own, width, dtype=dtype).permute(1, 2, 0, 3) for own in (heads, groups, groups))
    return torch.zeros_like(query), query, key, value, torch.zeros_like(query), torch.zeros(1, heads, rows)


def workspace(call: Callable[[], Any]) -> int:
    """Bytes that a call has alive at most beside what it returns, by the allocator of the host."""
    with allocations() as found:
        made = call()
        kept = sum(part.untyped_storage().nbytes() for part in made)
        del made
    assert found.is_complete
    return max(accumulate(size for _, size, _ in found.moves)) - kept


@pytest.mark.parametrize("groups", [4, 1])
def test_on_a_cpu_no_more_is_taken_than_what_is_counted_and_a_few_bytes_of_each_thread(groups: int) -> None:
    """The same few at each length."""
    for rows in (256, 1024, 2048):
        given = operands(4, groups, rows, 16, torch.float32)
        for target, own in ((sdpa.ATTENTION, given[1:4]), (sdpa.ATTENTION_BACKWARD, given)):
            counted = meter.followed(target, own, {"is_causal": True})
            taken = workspace(lambda: target(*own, is_causal=True))  # noqa: B023
            assert counted <= taken <= counted + torch.get_num_threads() * THREAD


@pytest.mark.parametrize(("heads", "groups"), [(8, 8), (8, 2), (1, 1)])
def test_on_cuda_what_grows_with_the_sequence_is_a_sum_of_one_group_of_heads(heads: int, groups: int) -> None:
    """In single precision, of rows or of keys; and copies of that group, while its gradients are put with the others."""
    counted: list[int] = []
    numbers: list[int] = []
    for rows in (1 << 21, 1 << 22):
        with supposed(device_called("H100").kind), FakeTensorMode():
            given = operands(heads, groups, rows, 128, torch.bfloat16)
            counted.append(meter.followed(sdpa.ATTENTION_BACKWARD, given, {"is_causal": True}))
        numbers.append(rows * 128)
    of_a_group = heads // groups
    sums = 4 * min(of_a_group, 2)
    parts = 2 * (of_a_group + 2) if groups > 1 else 0
    assert counted[1] - counted[0] <= 1.1 * (sums + parts) * (numbers[1] - numbers[0])
    blocks = 3 * (cuda_attention.ACCUMULATED + cuda_attention.EXPANDED)
    assert counted[1] <= (sums + parts) * numbers[1] + blocks
