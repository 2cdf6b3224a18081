"""The ways of training that are compared: what compiles the step, what is checkpointed, and how the loss is computed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FITS = "1TiB"  # a memory budget in which everything fits


@dataclass(frozen=True)
class Way:
    """`backend` compiles the step, with `options`; `checkpointing` is "", "early stop" (not reentrant) or "reentrant".

    `loss` is the model's own, or a name of `losses.LOSSES`. `functorch` are settings of torch._functorch.config. `package` has to
    be installed; with `cuda` it runs on a GPU only. `mlp_parts` rows of each MLP are checkpointed one after another.
    """

    name: str
    backend: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    checkpointing: str = ""
    loss: str = "own"
    functorch: Mapping[str, Any] = field(default_factory=dict)
    package: str = ""
    cuda: bool = False
    mlp_parts: int = 1

    def why_not(self, device: str) -> str:
        """Why it cannot run here; empty if it can."""
        if self.cuda and not device.startswith("cuda"):
            return f"{self.package} has CUDA kernels only"
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"the package {self.package} is not installed"
        return ""


_ALL = (
    Way("eager"),
    Way("checkpointing", checkpointing="early stop"),
    Way("checkpointing, reentrant", checkpointing="reentrant"),
    Way("checkpointing, loss in parts", checkpointing="early stop", loss="in parts"),
    Way("checkpointing, Liger loss", checkpointing="early stop", loss="liger", package="liger_kernel", cuda=True),
    Way("checkpointing, CCE", checkpointing="early stop", loss="cce", package="cut_cross_entropy", cuda=True),
    Way("checkpointing, inductor", "inductor", checkpointing="early stop"),
    Way("checkpointing, linear_cross_entropy", checkpointing="early stop", loss="torch"),
    Way("checkpointing, linear_cross_entropy, tiled MLP", checkpointing="early stop", loss="torch", mlp_parts=8),
    Way("mini-sequences"),
    Way("aot_eager", "aot_eager"),
    Way("inductor", "inductor"),
    Way("inductor, AutoChunker", "inductor", {"auto_chunker.enable": True}),
    Way("inductor, activation budget 0.5", "inductor", functorch={"activation_memory_budget": 0.5}),
    Way("inductor, activation budget 0.1", "inductor", functorch={"activation_memory_budget": 0.1}),
    Way("streambp", "streambp"),
    Way("streambp, eager bodies", "streambp", {"bodies": "eager"}),
    Way("streambp, inductor bodies", "streambp", {"bodies": "inductor"}),
    Way("streambp, attention kept", "streambp", {"save": "attention"}),
    Way("streambp, inputs kept", "streambp", {"save": "inputs"}),
    Way("streambp, every 2nd input", "streambp", {"keep_every": 2}),
    Way("streambp, inputs offloaded", "streambp", {"offload": "inputs"}),
    Way("streambp, everything fits", "streambp", {"memory_budget": FITS}),
)
WAYS = {way.name: way for way in _ALL}
