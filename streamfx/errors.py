"""Errors that streamfx raises on purpose. Each says the request, the value found, the place, and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from textwrap import shorten
from types import MappingProxyType
from typing import Any

MAX_MESSAGE_LENGTH = 300  # characters of another library's error message


class StreamFXError(Exception):
    """Base of all errors that streamfx raises on purpose.

    Args:
        asked: the request that cannot be met.
        found: the value that was found instead.
        where: the place: a file, a rank, a line of the model's code.
        do: the remedy.

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
        """Format the message: the request, then a line for each of the other texts that is given."""
        self.asked, self.found, self.where, self.do = asked, found, where, do
        super().__init__(self._message())

    def _message(self) -> str:
        """Return the request, then each of the other texts under its label, with further lines of a text indented."""
        texts = (("found", self.found), ("where", self.where), ("do", self.do))
        lines = [f"  {label:<6}{text}".replace("\n", f"\n{8 * ' '}") for label, text in texts if text]
        return "\n".join([self.asked, *lines])


def describe_error(error: BaseException) -> str:
    """Return the type of an error of another library, and at most 300 characters of its message, in one line."""
    return shorten(f"{type(error).__name__}: {error}", MAX_MESSAGE_LENGTH, placeholder=" ...")


def with_article(kind: str) -> str:
    """Return a type's name with its article, for an error message.

    >>> with_article("Enabled"), with_article("int"), with_article("LSTM"), with_article("UNet")
    ('an Enabled', 'an int', 'an LSTM', 'a UNet')
    """
    is_acronym = len(kind) > 1 and kind[:3].isupper()
    return f"{'an' if kind[:1] in ('AEFHILMNORSX' if is_acronym else 'AEIOaeio') else 'a'} {kind}"


def ordinal(number: int) -> str:
    """Return a number as an ordinal.

    >>> print(*(ordinal(number) for number in (1, 2, 3, 4, 11, 12, 13, 21, 102, 112)))
    1st 2nd 3rd 4th 11th 12th 13th 21st 102nd 112th
    """
    return f"{number}{'th' if number % 100 in (11, 12, 13) else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


class OptionError(StreamFXError, ValueError):
    """An option that does not exist, or a value that an option cannot take.

    Options come from `torch.compile(..., options={...})`, `streamfx.configure(...)`, and the environment variable
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
    """An invalid rule for an operator, or an invalid recurrence: see `streamfx.register_rule`.

    Example:
        >>> import torch, streamfx
        >>> try:
        ...     streamfx.register_rule(torch.ops.aten.mm.default, "m k, k n -> m n")
        ... except streamfx.RuleError as error:
        ...     print(error.found)
        the operator already has a rule
    """


class NotStreamedError(StreamFXError, RuntimeError):
    """A stage cannot be chunked, and `strict=True` requires it.

    Without `strict`, such a stage is not chunked: it runs unchanged on the full sequence, and `streamfx.explain` shows
    the reason.

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
        strict=True requires every stage to stream
    """


class StaleGraphError(StreamFXError, RuntimeError):
    """A property on which the compiled graph relies has changed since it was compiled.

    Example:
        >>> import streamfx
        >>> error = streamfx.StaleGraphError("a parameter requires a gradient that the compiled graph does not compute")
        >>> isinstance(error, RuntimeError), error.asked.split()[:2]
        (True, ['a', 'parameter'])
    """


class StaleOutputError(StreamFXError, RuntimeError):
    """A deferred output was accessed after the parameters from which it is computed had changed.

    Deferred outputs (such as the logits of a model that returns a loss) are computed at their first use. Use them before
    the optimizer's step, or set `outputs="dense"`.

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
    """A deferred output was written to, with autograd on, after an in-place change of its shape (`transpose_` ...).

    Autograd would compute gradients of earlier views with the new shape. Use an out-of-place `transpose`, or set
    `outputs="dense"`.

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
        use `transpose` or `squeeze` out of place, or compile with outputs="dense"
    """


class RanksDifferError(StreamFXError, RuntimeError):
    """A graph with collectives could not be analyzed on a rank, or not all ranks have compiled it.

    A graph without collectives would fall back to the full sequence. But ranks with chunks run collectives in another
    order: they would wait for this rank forever, or receive wrong values.

    Example:
        >>> import streamfx
        >>> error = streamfx.RanksDifferError("all ranks have to run the same collectives", where="rank 1")
        >>> print(error)
        all ranks have to run the same collectives
          where rank 1
    """


class NotTracedError(StreamFXError, RuntimeError):
    """`streamfx.explain` could not trace the call: the backend got no graph.

    The call fails, or Dynamo is disabled for it, or it computes nothing with tensors.

    Example:
        >>> import streamfx
        >>> try:
        ...     streamfx.explain(lambda number: number + 1, 2)
        ... except streamfx.NotTracedError as error:
        ...     print(error.asked)
        explain and plan trace calls that torch.compile can trace
    """


class NotComparableError(StreamFXError, RuntimeError):
    """`streamfx.verify` cannot compare two runs of the model.

    The model draws random numbers, has no loss, or its tensors hold no data.

    Example:
        >>> import torch, streamfx
        >>> try:
        ...     streamfx.verify(torch.nn.Dropout(0.5), torch.randn(4, 4))
        ... except streamfx.NotComparableError as error:
        ...     print(error.do)
        call model.eval(), or set the probabilities of dropout to 0
    """


class OverBudgetError(StreamFXError, MemoryError):
    """`memory_budget` is smaller than the peak of the smallest plan.

    The step does not fit the budget, whatever is recomputed or chunked. `smallest` is the peak of the smallest plan in
    bytes, `terms` its categories, `on_host` its bytes on the host. `advise` returns a better remedy. It is called when the
    text is first asked for, because that of a plan is a search, which traces further steps.

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
    on_host = 0
    advise: Callable[[], str] | None = None

    def __str__(self) -> str:
        """Return the message, with the remedy that `advise` finds."""
        if (advise := self.advise) is not None:
            self.advise = None
            self.do = advise()
        return self._message()

    def __reduce__(self) -> Any:
        """Pickle the error with its remedy, not with the search for it."""
        str(self)
        return super().__reduce__()


class OffloadSpaceError(StreamFXError, OSError):
    """Offloaded values (`offload="inputs"` or `"attention"`) do not fit into host memory or onto the disk.

    With a GPU they are in pinned host memory; on a CPU they are in files in `folder`, which is empty otherwise. `needed`
    bytes were requested, and `free` bytes are left, or None if the system does not report them.

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
    """`streamfx.plan` cannot plan the request: no such configuration, device, or option.

    Example:
        >>> import streamfx
        >>> try:
        ...     streamfx.plan("no-such-model")
        ... except streamfx.PlanError as error:
        ...     print(error.asked)
        there is no configuration 'no-such-model'
    """


class IntegrationError(StreamFXError, TypeError):
    """`streamfx.enable` got an object that it cannot compile in place.

    Example:
        >>> import streamfx
        >>> try:
        ...     streamfx.enable("my model")
        ... except streamfx.IntegrationError as error:
        ...     print(error.asked)
        streamfx.enable takes a module, or a trainer that has one
    """


class ProfileError(StreamFXError, RuntimeError):
    """`streamfx.profile` cannot measure: another profiler is active, or a profile is read before its block ends.

    Example:
        >>> import streamfx
        >>> with streamfx.profile() as profile:
        ...     try:
        ...         profile.summary()
        ...     except streamfx.ProfileError as error:
        ...         print(error.asked)
        the profile has no measurement yet
    """


class ReportError(StreamFXError, OSError):
    """A report cannot be written to the given path, or does not contain the requested item.

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
    """A result of `explain`, `profile`, or `enable` cannot be pickled or copied: it holds graphs of its process."""


class ModelError(StreamFXError, ValueError):
    """The command line got no valid model: neither a Hugging Face folder nor `package.module:factory`."""
