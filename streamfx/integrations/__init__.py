"""One call for an existing trainer or model: `streamfx.enable(trainer_or_model, chunk_size=1024)`.

The package knows the shape of trainers and models (transformers, TRL, PEFT, DeepSpeed, FSDP), but imports none of these
libraries: it recognizes objects by their attributes. Only `callback.py`, which needs transformers, is imported on first
use. It may import `tools.inspect` and every layer below, but not the planner, and it modifies trainers and models only
until `disable`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamfx.argument_checks import check_call
from streamfx.errors import IntegrationError
from streamfx.integrations.enabled import ORIGIN, EnabledModules, check_dynamic
from streamfx.integrations.repeated_enable import enable_once, enabled_handles
from streamfx.options import environment_options, merge_options

if TYPE_CHECKING:
    from streamfx.integrations.callback import StreamArguments, StreamCallback

__all__ = ["EnabledModules", "StreamArguments", "StreamCallback", "disable", "enable"]


def __getattr__(name: str) -> Any:
    """Import `StreamArguments` and `StreamCallback`, which need transformers, at their first use (PEP 562)."""
    if name not in ("StreamArguments", "StreamCallback"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from streamfx.integrations import callback

    return getattr(callback, name)


@check_call(IntegrationError, ORIGIN)
def enable(trainer_or_model: Any, *, dynamic: bool | None = None, options: Any = None, **keywords: Any) -> EnabledModules:
    """Run a model, or the models of a trainer, through `backend="streambp"`, in place.

    Takes an `nn.Module` (including PEFT models, Lightning Fabric modules, and modules wrapped by DistributedDataParallel,
    FSDP or DeepSpeed), or a trainer that holds one: transformers' `Trainer`, TRL's trainers. It compiles the full model, or
    its backbone if the trainer applies the head itself, or each module wrapped by FSDP, and also a frozen reference or
    teacher model of the trainer. Modules keep their identity: `state_dict` keys, saving, loading and generation do not
    change.

    A second call with the same options returns the existing result. Other options replace the first ones, with a warning, and the
    next call recompiles.

    Args:
        trainer_or_model: the model, or the trainer after its construction.
        dynamic: as in `torch.compile`; by default lengths become dynamic when a second one occurs, so that all share one graph.
        options: the backend's, as a dictionary or `streamfx.Options`.
        keywords: options by name (`chunk_size=1024`); both may be given if they do not contradict each other.

    Returns:
        A handle: it prints a summary, `.disable()` undoes the change (as `streamfx.disable` does), and it is a context manager.

    Raises:
        IntegrationError: the object cannot be compiled in place, or is already compiled by other means.
        OptionError: an unknown option, or an invalid value. Nothing is changed in either case.

    Example:
        >>> import torch, streamfx
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
        >>> print(streamfx.enable(model, chunk_size=16))
        streamfx: on; options {'chunk_size': 16}
          model (Sequential): its forward, and the loss if the forward computes it; 0 calls through streambp, 0 in eager
        >>> streamfx.disable(model)
    """
    environment_options()  # report invalid variables now, not at the first call of the model
    chosen = merge_options(options, keywords, ORIGIN)
    check_dynamic(dynamic)
    return enable_once(trainer_or_model, chosen, dynamic)


@check_call(IntegrationError, "streamfx.disable(...)")
def disable(trainer_or_model: Any) -> None:
    """Undo `streamfx.enable`: a model, or the models of a trainer, run as before.

    Modules enabled in one call are disabled together. If nothing is enabled, nothing happens.

    Args:
        trainer_or_model: the argument of `enable`, or a model or trainer that contains it, or that it contains.

    Raises:
        IntegrationError: the object is neither a module nor a trainer with one.

    Example:
        >>> import torch, streamfx
        >>> model = torch.nn.Linear(8, 8)
        >>> enabled = streamfx.enable(model)
        >>> streamfx.disable(model)
        >>> enabled.is_enabled
        False
    """
    for handle in enabled_handles(trainer_or_model):
        handle.disable()
