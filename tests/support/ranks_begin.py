"""Import the packages that tests of ranks need, and compile a model, which fills torch's caches.

Imported once, by the process that ranks are forked from (`ranks.py`). Where torch has an accelerator nothing is compiled:
autograd would start a thread for each device, and those are not there in a forked process.
"""

import torch
import torch.distributed._functional_collectives
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.profiler

from streamfx.frontend.backend import streambp
from tests.support.collectives import data_of
from tests.support.sharded import Decoder


def compile_once() -> None:
    torch.set_num_threads(1)
    torch.compile(Decoder(layers=1), backend=streambp)(*data_of(0, 32)).backward()
    torch._dynamo.reset()


if torch.accelerator.current_accelerator() is None:
    compile_once()
