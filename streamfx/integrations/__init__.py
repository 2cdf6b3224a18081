"""One call for the trainer that is already there: `streamfx.integrations.enable(trainer_or_model, **options)`.

No library is imported here: trainers and models are known by what they have, not by what they are called.
"""

from __future__ import annotations

from typing import Any

from streamfx.integrations.enabled import Enabled

__all__ = ["Enabled", "enable"]


def enable(trainer_or_model: Any, *, dynamic: bool | None = None, **options: Any) -> Enabled:
    """Run a model, or the models of a trainer, through `backend="streambp"`, in place.

    Takes an `nn.Module` (a PEFT model, a Lightning Fabric module, one that DistributedDataParallel, FSDP or DeepSpeed has
    wrapped), or a trainer that has one: transformers' `Trainer`, TRL's trainers. Compiled is the whole model, or its backbone
    where the trainer applies the head itself, or each module that FSDP has wrapped; a frozen reference or teacher that the
    trainer holds, too. Modules stay the objects they are: keys of `state_dict`, saving, loading and generation do not change.
    `options` are the backend's (`chunk_size=1024`), `dynamic` is `torch.compile`'s: by default lengths become dynamic at the
    second one seen, so that all lengths share one graph.

    The result prints what was done, and `.disable()` undoes it; it is a context manager, too.
    """
    return Enabled(trainer_or_model, options, dynamic)
