"""Refusals. Each says what was asked, what was found, where, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import shorten
from types import MappingProxyType

LONGEST = 300  # letters of what another's error says


class StreamFXError(Exception):
    """Base of all errors that streamfx raises on purpose."""

    def __init__(self, asked: str, found: str = "", where: str = "", do: str = "") -> None:
        self.asked, self.found, self.where, self.do = asked, found, where, do
        lines = [asked]
        lines += [f"  {label:<6}{text}" for label, text in (("found", found), ("where", where), ("do", do)) if text]
        super().__init__("\n".join(lines))


def told(error: BaseException) -> str:
    """Another's error in a line: its kind, and the beginning of what it says."""
    return shorten(f"{type(error).__name__}: {error}", LONGEST, placeholder=" ...")


class OptionError(StreamFXError, ValueError):
    """An option that does not exist, or a value that it cannot take.

    Options come from `torch.compile(..., options={...})`, `streamfx.configure(...)` and the environment variable
    `STREAMFX_OPTIONS`; all three are checked before anything is compiled.
    """


class RuleError(StreamFXError, ValueError):
    """A rule for an operator that cannot be: see `streamfx.register_rule`."""


class NotStreamed(StreamFXError, RuntimeError):
    """`strict=True` was asked for, and a stage cannot stream.

    Without `strict` such a stage runs whole, exactly as it stood, and `streamfx.explain` shows the reason.
    """


class StaleGraph(StreamFXError, RuntimeError):
    """Something that the compiled graph relies on has changed since it was compiled."""


class StaleOutput(StreamFXError, RuntimeError):
    """A deferred output was touched after the parameters that it is computed from had changed.

    Deferred outputs (the logits beside a loss) are computed when they are first used. Use them before the optimizer's step, or
    ask for `outputs="dense"`.
    """


class TurnedOutput(StreamFXError, RuntimeError):
    """A deferred output that was turned in place (`transpose_`, `squeeze_` ...) was written to where its gradient is followed.

    Autograd would find the gradients of views that were taken before by the shape that it has now. Turn a copy (`transpose`), or
    ask for `outputs="dense"`.
    """


class RanksDiffer(StreamFXError, RuntimeError):
    """A graph with collectives could not be analysed on a rank, or not all ranks have compiled it.

    Without collectives it would run whole. But ranks that stream gather and reduce in another order: they would wait for this
    one for ever, or be handed other values than they asked for.
    """


class NotTraced(StreamFXError, RuntimeError):
    """`streamfx.explain` could not follow the call: nothing of it arrived at the backend.

    The call fails, or Dynamo is switched off for it, or it computes nothing with tensors.
    """


class NotComparable(StreamFXError, RuntimeError):
    """`streamfx.verify` cannot compare two runs of the model.

    It draws random numbers, has no loss, or its tensors hold no data.
    """


class OverBudget(StreamFXError, MemoryError):
    """`memory_budget` is less than the smallest plan takes.

    The step would not fit into the memory that was said to be there, whatever is made again or cut into chunks. `smallest` are
    the bytes of the smallest plan, `terms` what they are for.
    """

    smallest = 0
    terms: Mapping[str, int] = MappingProxyType({})


class NoRoom(StreamFXError, OSError):
    """What waits on the host (`offload="inputs"`) does not fit onto the disk.

    It was to wait in a file in `folder`, needs `needed` bytes there, and `free` are left, or None where the system does not tell.
    """

    folder = ""
    needed = 0
    free: int | None = None


class PlanError(StreamFXError, ValueError):
    """`streamfx.plan` was asked for something that it cannot plan: no such configuration, device or option."""


class IntegrationError(StreamFXError, TypeError):
    """`streamfx.integrations.enable` was given something that it cannot compile in place."""


class ReportError(StreamFXError, OSError):
    """A report cannot be written where it was asked for, or is asked about something that is not in it."""


class ModelError(StreamFXError, ValueError):
    """The command line was given no model that it can make: neither a Hugging Face folder nor `package.module:factory`."""
