"""One call for the trainer that is already there: `streamfx.enable(trainer_or_model, chunk_size=1024)`.

No library is imported here: trainers and models are known by what they have, not by what they are called. `StreamCallback`, which
is a class of transformers', is imported at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamfx.argument_checks import refusing
from streamfx.errors import IntegrationError
from streamfx.integrations.again import enabled, enabled_in
from streamfx.integrations.enabled import ORIGIN, EnabledModules, check_dynamic
from streamfx.options import from_environment, merged

if TYPE_CHECKING:
    from streamfx.integrations.callback import StreamCallback

__all__ = ["EnabledModules", "StreamCallback", "disable", "enable"]


def __getattr__(name: str) -> Any:
    """What needs a library, imported at its first use (PEP 562)."""
    if name != "StreamCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from streamfx.integrations.callback import StreamCallback

    return StreamCallback


@refusing(IntegrationError, ORIGIN)
def enable(trainer_or_model: Any, *, dynamic: bool | None = None, options: Any = None, **keywords: Any) -> EnabledModules:
    """Run a model, or the models of a trainer, through `backend="streambp"`, in place.

    Takes an `nn.Module` (a PEFT model, a Lightning Fabric module, one that DistributedDataParallel, FSDP or DeepSpeed has
    wrapped), or a trainer that has one: transformers' `Trainer`, TRL's trainers. Compiled is the whole model, or its backbone
    where the trainer applies the head itself, or each module that FSDP has wrapped; a frozen reference or teacher that the
    trainer holds, too. Modules stay the objects they are: keys of `state_dict`, saving, loading and generation do not change.

    Enabling once more with the same options changes nothing, and returns what is there. Other options take the place of the
    first ones, with a warning, and the next call compiles anew.

    Args:
        trainer_or_model: the model, or the trainer once it is made.
        dynamic: as in `torch.compile`; by default lengths become dynamic at the second one seen, so that all share one graph.
        options: the backend's, as a dictionary or `streamfx.Options`.
        keywords: the same by their names (`chunk_size=1024`); both may be given, if they do not contradict each other.

    Returns:
        What was done: it prints, `.disable()` undoes it (so does `streamfx.disable`), and it is a context manager.

    Raises:
        IntegrationError: it was given something that cannot be compiled in place, or that is compiled by something else.
        OptionError: an option that does not exist, or a value that it cannot have. Nothing is changed in either case.

    Example:
        >>> import torch, streamfx
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
        >>> print(streamfx.enable(model, chunk_size=16))
        streamfx: on; options {'chunk_size': 16}
          model (Sequential): what its forward computes, and the loss where it is in it; 0 calls through streambp, 0 as they were
        >>> streamfx.disable(model)
    """
    from_environment()  # a bad one would be said at the first call of the model
    given = merged(options, keywords, ORIGIN)
    check_dynamic(dynamic)
    return enabled(trainer_or_model, given, dynamic)


@refusing(IntegrationError, "streamfx.disable(...)")
def disable(trainer_or_model: Any) -> None:
    """Let a model, or the models of a trainer, run as they did before `streamfx.enable`.

    What was enabled together is disabled together. Where nothing is enabled, nothing happens.

    Args:
        trainer_or_model: what was given to `enable`, or a model or trainer that holds it, or that it holds.

    Raises:
        IntegrationError: it was given neither a module nor a trainer that has one.

    Example:
        >>> import torch, streamfx
        >>> model = torch.nn.Linear(8, 8)
        >>> enabled = streamfx.enable(model)
        >>> streamfx.disable(model)
        >>> enabled.is_enabled
        False
    """
    for one in enabled_in(trainer_or_model):
        one.disable()
