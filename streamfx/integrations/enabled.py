"""What `enable` has done, in words, and how it is undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamfx.errors import IntegrationError, OptionError
from streamfx.integrations import packing
from streamfx.integrations.calls import Calls
from streamfx.integrations.targets import Target
from streamfx.options import checked

ORIGIN = "streamfx.integrations.enable(...)"


class Enabled:
    """Modules that run through the backend until `disable` is called."""

    def __init__(self, targets: Sequence[Target], options: Mapping[str, Any], dynamic: bool | None) -> None:
        self.options = _checked(options, dynamic)
        for target in targets:
            if target.module._compiled_call_impl is not None:
                raise IntegrationError(
                    f"streamfx.integrations.enable compiles {target.name} in place, and it is compiled already",
                    found="an earlier enable(...) or module.compile(...)",
                    do="call .disable() of what the first call returned, or leave module.compile(...) out",
                )
        self.targets = tuple(targets)
        self.calls = {target.name: Calls(target.module, self.options, dynamic) for target in targets}
        for target in targets:
            target.module._compiled_call_impl = self.calls[target.name]
            if self.calls[target.name].asks:
                packing.listen()
            if target.head is not None:
                target.head.narrow()

    def disable(self) -> None:
        """Let all modules run as they did before; may be called again."""
        for target in self.targets:
            if target.module._compiled_call_impl is self.calls[target.name]:
                target.module._compiled_call_impl = None
                if self.calls[target.name].asks:
                    packing.forget()
                if target.head is not None:
                    target.head.restore()

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *exception: object) -> None:
        self.disable()

    @property
    def is_enabled(self) -> bool:
        return any(target.module._compiled_call_impl is self.calls[target.name] for target in self.targets)

    def __str__(self) -> str:
        lines = [f"streamfx: {'on' if self.is_enabled else 'off'}; options {self.options or 'as they are by default'}"]
        for target in self.targets:
            calls = self.calls[target.name]
            counts = f"{calls.compiled} calls through streambp, {calls.plain} as they were"
            lines.append(f"  {target.name} ({type(target.module).__name__}): {target.why}; {counts}")
        return "\n".join(lines)

    __repr__ = __str__


def _checked(options: Mapping[str, Any], dynamic: Any) -> dict[str, Any]:
    """The backend's options, named one by one; raises before anything is compiled."""
    if "options" in options:
        raise OptionError(
            f"{ORIGIN} takes options by their names", found=f"options={options['options']!r}", do="write chunk_size=1024"
        )
    if dynamic is not None and not isinstance(dynamic, bool):
        raise OptionError(
            f"dynamic of {ORIGIN} cannot be {dynamic!r}",
            found=f"{dynamic!r} ({type(dynamic).__name__})",
            do="give True (one graph for all lengths), False (a graph for each), or None (torch.compile's default)",
        )
    return checked(options, ORIGIN)
