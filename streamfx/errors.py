"""Refusals. Each says what was asked, what was found, where, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import shorten
from types import MappingProxyType

LONGEST = 300  # letters of what another's error says


class StreamFXError(Exception):
    """Base of all errors that streamfx raises on purpose.

    Args:
        asked: what was asked for, and cannot be.
        found: what was found instead.
        where: the place: a file, a rank, a line of the model's code.
        do: what helps.

    Example:
        >>> import streamfx
        >>> try:
        ...     streamfx.Options(bodies="inductr")
        ... except streamfx.StreamFXError as error:
        ...     print(error)
        option 'bodies' of streamfx.Options(...) cannot be 'inductr'
          found 'inductr' (str)
          do    did you mean 'inductor'? allowed: 'eager', 'inductor', 'auto'
    """

    def __init__(self, asked: str, found: str = "", where: str = "", do: str = "") -> None:
        self.asked, self.found, self.where, self.do = asked, found, where, do
        lines = [asked]
        lines += [f"  {label:<6}{text}" for label, text in (("found", found), ("where", where), ("do", do)) if text]
        super().__init__("\n".join(lines))


def told(error: BaseException) -> str:
    """Another's error in a line: its kind, and the beginning of what it says."""
    return shorten(f"{type(error).__name__}: {error}", LONGEST, placeholder=" ...")


def one(kind: str) -> str:
    """With its article.

    >>> one("Enabled"), one("int"), one("LSTM"), one("Tensor"), one("UNet")
    ('an Enabled', 'an int', 'an LSTM', 'a Tensor', 'a UNet')
    """
    is_spelled = len(kind) > 1 and kind[:3].isupper()
    return f"{'an' if kind[:1] in ('AEFHILMNORSX' if is_spelled else 'AEIOaeio') else 'a'} {kind}"


def ordinal(number: int) -> str:
    """A number as it counts things.

    >>> print(*(ordinal(number) for number in (1, 2, 3, 4, 11, 12, 13, 21, 102, 112)))
    1st 2nd 3rd 4th 11th 12th 13th 21st 102nd 112th
    """
    return f"{number}{'th' if number % 100 in (11, 12, 13) else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


class OptionError(StreamFXError, ValueError):
    """An option that does not exist, or a value that it cannot take.

    Options come from `torch.compile(..., options={...})`, `streamfx.configure(...)` and the environment variable
    `STREAMFX_OPTIONS`; all three are checked before anything is compiled.

    Example:
        >>> import streamfx
        >>> try:
        ...     streamfx.configure(chunksize=512)
        ... except streamfx.OptionError as error:
        ...     print(error.asked)
        streamfx.configure(...) has no option 'chunksize'
    """


class RuleError(StreamFXError, ValueError):
    """A rule for an operator that cannot be: see `streamfx.register_rule`.

    Example:
        >>> import torch, streamfx
        >>> try:
        ...     streamfx.register_rule(torch.ops.aten.mm.default, "m k, k n -> m n")
        ... except streamfx.RuleError as error:
        ...     print(error.found)
        the operator has a rule already
    """


class NotStreamedError(StreamFXError, RuntimeError):
    """`strict=True` was asked for, and a stage cannot stream.

    Without `strict` such a stage runs whole, exactly as it stood, and `streamfx.explain` shows the reason.

    Example:
        >>> import torch, streamfx
        >>> def sort_of_rows(x):
        ...     mixed = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        ...     return mixed.sort(1).values.square().mean()
        >>> compiled = torch.compile(sort_of_rows, backend="streambp", options={"strict": True})
        >>> try:
        ...     compiled(torch.randn(1, 64, 8, requires_grad=True))
        ... except streamfx.NotStreamedError as error:
        ...     print(error.asked)
        strict=True asks that every stage streams
    """


class StaleGraphError(StreamFXError, RuntimeError):
    """Something that the compiled graph relies on has changed since it was compiled.

    Example:
        >>> import streamfx
        >>> error = streamfx.StaleGraphError("a parameter asks for a gradient that the compiled graph does not compute")
        >>> isinstance(error, RuntimeError), error.asked.split()[:2]
        (True, ['a', 'parameter'])
    """


class StaleOutputError(StreamFXError, RuntimeError):
    """A deferred output was touched after the parameters that it is computed from had changed.

    Deferred outputs (the logits beside a loss) are computed when they are first used. Use them before the optimizer's step, or
    ask for `outputs="dense"`.

    Example:
        >>> import torch, streamfx
        >>> head = torch.nn.Linear(8, 512)
        >>> def step(x):
        ...     logits = head(x)
        ...     return logits, logits.logsumexp(-1).mean()
        >>> logits, loss = torch.compile(step, backend="streambp")(torch.randn(1, 64, 8))
        >>> _ = torch.nn.init.zeros_(head.weight)
        >>> try:
        ...     logits.sum()
        ... except streamfx.StaleOutputError as error:
        ...     print(error.found)
        head.weight was changed in place since the call (1 time)
    """


class TransposedOutputError(StreamFXError, RuntimeError):
    """A deferred output that was turned in place (`transpose_`, `squeeze_` ...) was written to where its gradient is followed.

    Autograd would find the gradients of views that were taken before by the shape that it has now. Turn a copy (`transpose`), or
    ask for `outputs="dense"`.

    Example:
        >>> import torch, streamfx
        >>> head = torch.nn.Linear(8, 512)
        >>> def step(x):
        ...     logits = head(x)
        ...     return logits, logits.logsumexp(-1).mean()
        >>> logits, loss = torch.compile(step, backend="streambp")(torch.randn(1, 64, 8))
        >>> part = logits[:, 1:]
        >>> turned = logits.transpose_(0, 1)
        >>> try:
        ...     part.mul_(0.5)
        ... except streamfx.TransposedOutputError as error:
        ...     print(error.do)
        turn a copy (`transpose`, `squeeze`), or compile with outputs="dense"
    """


class RanksDifferError(StreamFXError, RuntimeError):
    """A graph with collectives could not be analysed on a rank, or not all ranks have compiled it.

    Without collectives it would run whole. But ranks that stream gather and reduce in another order: they would wait for this
    one for ever, or be handed other values than they asked for.

    Example:
        >>> import streamfx
        >>> error = streamfx.RanksDifferError("all ranks have to run the same collectives", where="rank 1")
        >>> print(error)
        all ranks have to run the same collectives
          where rank 1
    """


class NotTracedError(StreamFXError, RuntimeError):
    """`streamfx.explain` could not follow the call: nothing of it arrived at the backend.

    The call fails, or Dynamo is switched off for it, or it computes nothing with tensors.

    Example:
        >>> import streamfx
        >>> try:
        ...     streamfx.explain(lambda number: number + 1, 2)
        ... except streamfx.NotTracedError as error:
        ...     print(error.asked)
        explain and plan follow calls that torch.compile can trace
    """


class NotComparableError(StreamFXError, RuntimeError):
    """`streamfx.verify` cannot compare two runs of the model.

    It draws random numbers, has no loss, or its tensors hold no data.

    Example:
        >>> import torch, streamfx
        >>> try:
        ...     streamfx.verify(torch.nn.Dropout(0.5), torch.randn(4, 4))
        ... except streamfx.NotComparableError as error:
        ...     print(error.do)
        call model.eval(), or set the probabilities of dropout to 0
    """


class OverBudgetError(StreamFXError, MemoryError):
    """`memory_budget` is less than the smallest plan takes.

    The step would not fit into the memory that was said to be there, whatever is made again or cut into chunks. `smallest` are
    the bytes of the smallest plan, `terms` what they are for.

    Example:
        >>> import torch, streamfx
        >>> weight = torch.randn(64, 64, requires_grad=True)
        >>> try:
        ...     streamfx.explain(lambda x: (x @ weight).square().mean(), torch.randn(1, 4096, 64), memory_budget=1000)
        ... except streamfx.OverBudgetError as error:
        ...     print(error.smallest > 1000, list(error.terms)[:1])
        True ['parameters']
    """

    smallest = 0
    terms: Mapping[str, int] = MappingProxyType({})


class OffloadSpaceError(StreamFXError, OSError):
    """Offloaded values (`offload="inputs"` or `"attention"`) do not fit into the host's memory, or onto the disk.

    With a GPU they wait in pinned memory of the host; on a CPU they wait in files in `folder`, which is empty otherwise. `needed`
    bytes were asked for, and `free` are left, or None if the system does not say.

    Example:
        >>> import streamfx
        >>> error = streamfx.OffloadSpaceError("the input of a stage was to wait in a file", do="let TMPDIR name a larger disk")
        >>> isinstance(error, OSError), error.needed, error.free
        (True, 0, None)
    """

    folder = ""
    needed = 0
    free: int | None = None


class PlanError(StreamFXError, ValueError):
    """`streamfx.plan` was asked for something that it cannot plan: no such configuration, device or option.

    Example:
        >>> import streamfx
        >>> try:
        ...     streamfx.plan("no-such-model")
        ... except streamfx.PlanError as error:
        ...     print(error.asked)
        there is no configuration 'no-such-model'
    """


class IntegrationError(StreamFXError, TypeError):
    """`streamfx.enable` was given something that it cannot compile in place.

    Example:
        >>> import streamfx
        >>> try:
        ...     streamfx.enable("my model")
        ... except streamfx.IntegrationError as error:
        ...     print(error.asked)
        streamfx.enable takes a module, or a trainer that has one
    """


class ProfileError(StreamFXError, RuntimeError):
    """`streamfx.profile` cannot measure: another profiler is on, or a profile is asked for figures before its block is left.

    Example:
        >>> import streamfx
        >>> with streamfx.profile() as profile:
        ...     try:
        ...         profile.summary()
        ...     except streamfx.ProfileError as error:
        ...         print(error.asked)
        a profile is asked for what it has measured
    """


class ReportError(StreamFXError, OSError):
    """A report cannot be written where it was asked for, or is asked about something that is not in it.

    Example:
        >>> import torch, streamfx
        >>> weight = torch.randn(8, 8, requires_grad=True)
        >>> found = streamfx.explain(lambda x: (x @ weight).square().mean(), torch.randn(2, 64, 8), chunk_size=16)
        >>> try:
        ...     found.to_html("no such folder/step.html")
        ... except streamfx.ReportError as error:
        ...     print(error.found)
        no folder 'no such folder'
    """


class NotCopyableError(StreamFXError, TypeError):
    """What `explain`, `profile` or `enable` has returned was to be pickled or copied, and holds graphs of its process."""


class ModelError(StreamFXError, ValueError):
    """The command line was given no model that it can make: neither a Hugging Face folder nor `package.module:factory`."""
