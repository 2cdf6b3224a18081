"""Detect whether the content of a tensor changed, by its version, its memory, and a checksum of its bytes.

A version counter misses writes through `.data`, `.numpy()`, `untyped_storage()`, a fused optimizer, another process, or a
custom kernel. So the bytes are summed, each 32-bit word times a random 64-bit number. Two different contents have equal
sums with a probability of 2^-33 or less, and reordered or negated contents also have different sums. Reading a weight
costs as much as multiplying it by a few dozen rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from streamfx.torch_private import FakeTensor, is_traceable_wrapper_subclass, no_modes

MAX_BYTES = 1 << 30  # larger inputs are not read at each call, and not trusted
WORDS = 1 << 12  # 32-bit words per row; each row has one sum
ROWS = 1 << 8  # rows per block; a block (4 MiB) is summed at once and stays in the processor's cache


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """The state of a tensor at one time. If its bytes were not read, it has only a layout and a version."""

    layout: tuple[Any, ...]  # dtype, device, shape, strides
    version: int | None  # torch's count of writes in place; None for an inference tensor
    nbytes: int | None = None  # of its storage
    sums: Tensor | None = None  # its checksum

    @staticmethod
    def of(tensor: Tensor, reads: bool = True) -> Fingerprint:
        """Record the state of a tensor. If `reads`, and it has memory, read all its bytes, without waiting for the device."""
        layout, version = _layout(tensor), _version(tensor)
        if not reads or not has_memory(tensor):
            return Fingerprint(layout, version)
        return Fingerprint(layout, version, tensor.untyped_storage().nbytes(), checksum(tensor))

    def change(self, tensor: Tensor, name: str = "it") -> str | None:
        """Describe how a tensor, called `name`, changed since then; None if it did not. May read its bytes and wait for them."""
        return self.visible_change(tensor, name) or self.hidden_change(tensor, name)

    def visible_change(self, tensor: Tensor, name: str = "it") -> str | None:
        """Describe a change of version, layout, or memory, which shows without reading the values; None if nothing changed."""
        if self.is_written(tensor):
            times = abs((_version(tensor) or 0) - (self.version or 0))
            return f"{name} was changed in place since the call ({times} time{'s' if times > 1 else ''})"
        if _layout(tensor) != self.layout:
            return f"{name} has another shape, type or device than in the call"
        if self.sums is None:
            return None
        if not has_memory(tensor) or tensor.untyped_storage().nbytes() != self.nbytes:
            return f"the memory of {name} was freed since the call"
        return None

    def is_written(self, tensor: Tensor) -> bool:
        """Return whether the version counter has changed since then; False if it is unknown, then or now."""
        version = _version(tensor)
        return None not in (self.version, version) and version != self.version

    def hidden_change(self, tensor: Tensor, name: str = "it") -> str | None:
        """Describe a change of the values, by their checksum; None if they are equal, or were not read. Waits for the device."""
        if self.sums is None:
            return None
        with no_modes():
            same = torch.equal(checksum(tensor), self.sums)
        return None if same else f"{name} holds other values than in the call (written past its version counter, as .data is)"


def any_hidden_change(fingerprints: Sequence[tuple[Fingerprint, Tensor]]) -> bool:
    """Return whether the values of any (fingerprint, tensor) have changed. Waits once for each device."""
    flags_by_device: dict[torch.device, list[Tensor]] = {}
    with no_modes(), torch.no_grad():
        for fingerprint, tensor in fingerprints:
            if fingerprint.sums is not None:
                flags_by_device.setdefault(tensor.device, []).append((checksum(tensor) != fingerprint.sums).any())
        return any(bool(torch.stack(flags).any()) for flags in flags_by_device.values())


def has_memory(tensor: Any) -> bool:
    """Return whether a value is a tensor whose bytes can be read: no fake, sparse, quantized, nested, wrapper or freed tensor."""
    if not isinstance(tensor, Tensor) or isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor):
        return False
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        return False
    return not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def checksum(tensor: Tensor) -> Tensor:
    """Return the checksum of a tensor, on its device: int64 sums, one for each `4 * WORDS` bytes."""
    with no_modes(), torch.no_grad():
        block_bytes = 4 * WORDS * ROWS
        sums = [_sums(block) for byte_slice in _byte_slices(tensor.detach()) for block in byte_slice.split(block_bytes)]
        return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.int64, device=tensor.device)


def _sums(block: Tensor) -> Tensor:
    """Return the sum of each row of a block of bytes [n]: of its 32-bit words, each times a random factor.

    Words are widened to 64 bits first: in a sum that wraps at 32 bits, pairs of signs would cancel.
    """
    words_per_row = WORDS if block.numel() >= 4 * WORDS else -(-block.numel() // 4)
    num_missing_bytes = -block.numel() % (4 * words_per_row)
    if num_missing_bytes or block.storage_offset() % 4:  # fill the last row; views as int32 must be aligned
        block = torch.cat((block, block.new_zeros(num_missing_bytes)))
    return torch.mul(block.view(torch.int32).view(-1, words_per_row), _factors(block.device)[:words_per_row]).sum(1)


@cache
def _factors(device: torch.device) -> Tensor:
    """Return the random odd 64-bit factor of each word of a row, the same in each process."""
    generator = torch.Generator().manual_seed(0x5EED)
    with torch.inference_mode(False):
        factors = torch.randint(-(1 << 63), (1 << 63) - 1, (WORDS,), generator=generator, device="cpu")
        return (factors | 1).to(device)


def _byte_slices(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the bytes of a tensor as uint8 vectors; elements that an expanded dimension repeats, only once.

    One vector without a copy, if the tensor fills its memory in some order of its dimensions; else copies of about a block.
    """
    if not tensor.numel():
        return
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        tensor = tensor.narrow(dim, 0, 1) if size > 1 and not stride else tensor
    tensor = tensor.resolve_conj().resolve_neg()
    in_memory_order = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim]))
    if in_memory_order.is_contiguous():
        yield in_memory_order.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        return
    slice_length = max(1, 4 * WORDS * ROWS * in_memory_order.shape[0] // in_memory_order.nbytes)
    yield from (part.reshape(-1).view(torch.uint8) for part in in_memory_order.split(slice_length))


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return (dtype, device, shape, strides) of a tensor, which show without reading its values."""
    return (tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride())


def _version(tensor: Tensor) -> int | None:
    """Return the version counter of a tensor; None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version
