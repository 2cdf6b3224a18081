"""DistributedDataParallel: gradients are reduced stage by stage, while the stages before are still computed.

torchrun --standalone --nproc-per-node 2 examples/distributed/ddp.py
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Step, compare, say

from streamfx import enable


def prepare(model: nn.Module) -> Step:
    wrapped = DistributedDataParallel(model)
    say(str(enable(wrapped, chunk_size=256)))  # the one line
    return wrapped


if __name__ == "__main__":
    compare(prepare)
