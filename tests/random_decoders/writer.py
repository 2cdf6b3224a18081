"""The lines of a program while it is being written."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.random_decoders.layouts import LAYOUTS, Layout
from tests.random_decoders.specification import Decoder


@dataclass
class Writer:
    """Collects the lines of `__init__` and `forward`, and the inputs beside ids and labels."""

    decoder: Decoder
    own: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.decoder.layout]

    def linear(self, name: str, inputs: int, outputs: int, bias: bool = False) -> str:
        self.own.append(f"self.{name} = nn.Linear({inputs}, {outputs}, bias={bias})")
        return f"self.{name}"

    def parameter(self, name: str, *shape: int) -> str:
        self.own.append(f"self.{name} = nn.Parameter(torch.randn({', '.join(map(str, shape))}) * 0.5)")
        return f"self.{name}"

    def embedding(self, name: str, rows: int, width: int) -> str:
        self.own.append(f"self.{name} = nn.Embedding({rows}, {width})")
        return f"self.{name}"

    def line(self, *lines: str) -> None:
        self.lines.extend(lines)

    def norm(self, kind: str, name: str, width: int) -> str:
        """A function that normalises, as text; "" for none."""
        match kind:
            case "spelled":
                self.own.append(f"self.{name} = Norm({width})")
            case "layer" if width > 2:  # of two numbers it leaves signs: their gradient is rounding
                self.own.append(f"self.{name} = nn.LayerNorm({width})")
            case "layer" | "rms":
                self.own.append(f"self.{name} = nn.RMSNorm({width})")
            case _:
                return ""
        return f"self.{name}"
