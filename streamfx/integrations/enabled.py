"""What `enable` has done, in words, and how it is undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamfx.errors import IntegrationError
from streamfx.integrations.calls import Calls
from streamfx.integrations.targets import Target
from streamfx.options import checked


class Enabled:
    """Modules that run through the backend until `disable` is called."""

    def __init__(self, targets: Sequence[Target], options: Mapping[str, Any], dynamic: bool | None) -> None:
        self.options = checked(options, "streamfx.integrations.enable(...)")
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
            if target.head is not None:
                target.head.narrow()

    def disable(self) -> None:
        """Let all modules run as they did before; may be called again."""
        for target in self.targets:
            if target.module._compiled_call_impl is self.calls[target.name]:
                target.module._compiled_call_impl = None
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
