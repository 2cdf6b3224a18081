"""Tests of Triton kernels without a GPU: `python -m tests.support.triton_programs interpreted`, or `compiled`.

Interpreted they run on the CPU, in a process that asks for it before Triton is imported; the interpreter has no products in
bfloat16, so types are others. Compiled they are machine code for cards that are not there.
"""

import os
import sys
from typing import Any

import torch
from torch import Tensor

CARDS = {90: "wgmma.mma_async", 80: "mma.sync"}  # capability, and its tensor core instruction


def interpreted() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    takes_numbers_of_one_element()
    from streamfx.kernels import triton_grouped_mm

    cpu = torch.device("cpu")
    for dtype in (torch.float16, torch.float32):
        assert triton_grouped_mm.multiply_is_correct(cpu, dtype)
        assert all(triton_grouped_mm.add_outer_is_correct(cpu, dtype, total) for total in (torch.float32, dtype))
    for sizes in ((3,), (0, 0), (1, 64, 0, 65, 7), (0, 200, 0), (2, 2, 2)):
        for none in (0, 3):
            for height, width in ((1, 1), (16, 129), (130, 40)):
                check(sizes, none, height, width)


def takes_numbers_of_one_element() -> None:
    """Let the interpreter loop up to an argument: Triton 3.6 makes a number of an array of shape [1], which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def with_index(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = with_index


def check(sizes: tuple[int, ...], none: int, height: int, width: int) -> None:
    """Random numbers, operands in any layout, rows of no group that are no numbers, and a total without any where no row is."""
    from streamfx.kernels.triton_grouped_mm import add_outer, multiply

    count, ends = sum(sizes) + none, torch.tensor(sizes).cumsum(0).to(torch.int32)
    order = torch.randperm(count)
    x, y = torch.randn(height, count).t(), torch.randn(count, 2 * width)[:, ::2]
    weight, total = torch.randn(len(sizes), width, height).transpose(1, 2), torch.randn(len(sizes), height, width)
    x[order[sum(sizes) :]] = torch.nan
    for group, size in enumerate(sizes):
        if not size:
            total[group] = weight[group] = torch.nan
    wanted, products = total.clone(), torch.zeros(count, width)
    for group, rows in enumerate(order[: sum(sizes)].split(list(sizes))):
        if len(rows):
            wanted[group] += x[rows].t() @ y[rows]
            products[rows] = x[rows] @ weight[group]
    add_outer(total, x, y, order, ends)
    close(total, wanted)
    close(multiply(x, weight, order, ends), products)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)


def compiled() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from streamfx.kernels import triton_grouped_mm as own

    sizes = {"TILE": own.TILE, "ROWS": own.ROWS, "DEPTH": own.DEPTH, "GROUPS": 32}
    pointers = {"total": "*fp32", "order": "*i64", "ends": "*i32", **dict.fromkeys(("x", "y", "weight", "out"), "*bf16")}
    for kernel, warps in ((own._add_outer, 8), (own._multiply, 4)):
        fixed = {name: sizes.get(name, 1) for name in kernel.arg_names if name in sizes or name.endswith("_column")}
        signature = {name: "constexpr" if name in fixed else pointers.get(name, "i32") for name in kernel.arg_names}
        attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name not in fixed}
        source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=attributes)
        for card, instruction in CARDS.items():
            made = triton.compile(source, target=GPUTarget("cuda", card, 32), options={"num_warps": warps, "num_stages": 3})
            assert instruction in made.asm["ptx"], (kernel, card)
            assert made.asm["cubin"], "the bundled ptxas makes machine code of it"
            assert made.metadata.shared <= 100 << 10, "more than every card has"  # GeForce cards have the least


if __name__ == "__main__":
    {"interpreted": interpreted, "compiled": compiled}[sys.argv[1]]()
