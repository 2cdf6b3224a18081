"""What is installed, and which kernels would be chosen."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import torch

from benchmarks.gpu import Finding, Place
from streamfx.runtime import cuda_attention, cuda_documents, cuda_last, cuda_windows
from streamfx.runtime.cuda_products import adds_in_place

WIDTHS = (64, 128)  # of heads, for which kernels are tried that we never saw
PACKAGES = ("triton", "flash_attn", "liger_kernel", "cut_cross_entropy", "transformers")


def versions(place: Place) -> Iterator[Finding]:
    """PyTorch, the card, and what of it streamfx counts on."""
    yield Finding("torch", "version", torch.__version__)
    for package in PACKAGES:
        yield Finding(package, "installed", str(importlib.util.find_spec(package) is not None))
    if not place.device.startswith("cuda"):
        yield Finding("device", "name", place.device)
        return
    device = torch.device(place.device)
    yield Finding("device", "name", torch.cuda.get_device_name(device))
    yield Finding("device", "capability", str(torch.cuda.get_device_capability(device)))
    yield Finding("CUDA, cuDNN", "version", f"{torch.version.cuda}, {torch.backends.cudnn.version()}")
    yield Finding("flash attention", "widest head", cuda_attention.flash_width(device))
    for dtype in (torch.bfloat16, torch.float16):
        for width in WIDTHS:
            yield Finding(
                "flash attention", f"{dtype}, width {width}: hides by window", str(cuda_windows.hides(device, dtype, width))
            )
            for kind in (dtype, torch.float32):
                ends = str([cuda_last.hides(device, kind, width, has_window) for has_window in (False, True)])
                yield Finding("memory-efficient attention", f"{kind}, width {width}: ends at the last row, in a window", ends)
            apart = cuda_documents.keeps_apart(device, dtype, width)
            yield Finding("flash attention", f"{dtype}, width {width}: keeps documents apart", str(apart))
        yield Finding("products", f"{dtype} added to float32 in place", str(adds_in_place(device, dtype)))
