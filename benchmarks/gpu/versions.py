"""What is installed, and which kernels streamfx's runtime chooses here."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.kernels import How, both_passes, chunk_mask, how_seen
from benchmarks.gpu.measures import Finding, operators
from benchmarks.gpu.place import GIB, Place
from streamfx.kernels import accumulate, grouped_mm

PACKAGES = ("triton", "transformers", "networkx", "jinja2", "numpy")
DRIVER = Path("/proc/driver/nvidia/version")
HEADS = ((torch.bfloat16, 64), (torch.bfloat16, 128), (torch.bfloat16, 256), (torch.float16, 128), (torch.float32, 128))
ROWS, PAST, LENGTHS = 256, 512, (100, 60, 96)  # of a chunk: whole tiles of every kernel, and documents


def versions(place: Place) -> Iterator[Finding]:
    """Software, the card, and the operators that a chunk's attention, products and experts run."""
    yield Finding("software", {"python": platform.python_version(), "torch": torch.__version__, **_packages(), **_compilers()})
    yield Finding("card", _card(place))
    for dtype, width in HEADS[:1] if place.small else HEADS:
        case = f"{str(dtype)[6:]}, width {width}"
        yield Finding(f"attention, {case}", _attention(place, dtype, width))
    yield Finding("products", {"float32 total": _product(place)})
    yield Finding("experts", {"bfloat16": _experts(place)})


def _packages() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def _compilers() -> dict[str, str]:
    """Triton compiles launchers of its kernels with a C compiler, Inductor C++ code for a CPU."""
    return {name: shutil.which(name) or "absent" for name in ("cc", "g++")}


def _card(place: Place) -> dict[str, Any]:
    cores = {"cores": os.cpu_count(), "device": place.device}
    if not place.has_cuda:
        return {**cores, "threads": torch.get_num_threads()}
    card, (free, total) = torch.cuda.get_device_properties(place.device), torch.cuda.mem_get_info(place.device)
    driver = re.search(r"\d+\.\d[\d.]*", DRIVER.read_text()) if DRIVER.is_file() else None
    return {
        "name": card.name,
        "capability": f"{card.major}.{card.minor}",
        "multiprocessors": card.multi_processor_count,
        "memory GiB": total / GIB,
        "free GiB": free / GIB,
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "driver": driver[0] if driver else "not known",
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        **cores,
    }


def _attention(place: Place, dtype: torch.dtype, width: int) -> dict[str, str]:
    """Operators of both passes of a chunk behind a past, by what its rows see."""
    query, gradient = (place.random(1, 4, ROWS, width, dtype=dtype, seed=seed) for seed in (0, 3))
    key, value = (place.random(1, 2, PAST + ROWS, width, dtype=dtype, seed=seed) for seed in (1, 2))
    found = {}
    for kind in ("causal", "window", "documents", "bias"):
        how = how_seen(kind, chunk_mask(kind, ROWS, PAST, place.device, LENGTHS), PAST, dtype)

        def work(how: How = how) -> None:
            both_passes((query, key, value, gradient), how)

        work()  # kernels are tried on known numbers first
        names = operators(work, "attention").replace("_scaled_dot_product_", "").split(", ")
        found[kind] = ", ".join(name for name in names if name.removesuffix("_backward") not in names or name[-9:] != "_backward")
    return found


def _product(place: Place) -> str:
    total = torch.zeros(64, 64, device=place.device)
    factor = place.random(64, 64)
    accumulate.add_product(total, factor, factor, is_first=False)
    return operators(lambda: accumulate.add_product(total, factor, factor, is_first=False), "mm", "streamfx")


def _experts(place: Place) -> str:
    x, weight, total = place.random(64, 64), place.random(4, 64, 64), torch.zeros(4, 64, 64, device=place.device)
    order, ends = grouped_mm.arrange(torch.arange(64, device=place.device) % 4, 4)

    def work() -> None:
        made: Tensor = grouped_mm.arranged_mm(x, weight, order, ends)
        grouped_mm.add_arranged_outer(total, x, made, order, ends)

    work()
    return f"{operators(work, 'mm', 'streamfx')}; adds by group: {grouped_mm.adds_by_group(total, x, x)}"
