"""Collects the lines of a program, and has fragments of Python for each layout."""

from dataclasses import dataclass, field

from tests.random_decoders.specification import Decoder
from tests.support.tables import named_cases

# How the dimensions of a program's tensors are ordered.
# Every core of attention sees q, k, v as [.., H, T, E], scores as [.., H, T, T].


@dataclass(frozen=True)
class Layout:
    """`x` is [sizes, D], and ids are [sizes]; `time` is the dimension of the sequence in both."""

    sizes: str
    time: int
    into_heads: str
    out_of_heads: str
    over_keys: str
    over_rows: str
    is_folded: bool = False

    def heads(self, x: str, heads: int, size: int) -> str:
        return f"{x}.view({self.sizes}, {heads}, {size}){self.into_heads}"

    def merged(self, y: str, width: int) -> str:
        return f"{y}{self.out_of_heads}.reshape({self.sizes}, {width})"

    def keys(self, mask: str, heads: int) -> str:
        """[sizes] in the shape of scores, along keys."""
        return f"{mask}{self.over_keys.format(heads=heads)}"

    def rows(self, mask: str, heads: int) -> str:
        return f"{mask}{self.over_rows.format(heads=heads)}"

    def per_head(self, values: str) -> str:
        """[H] in the shape of scores."""
        return f"{values}.repeat(b)[:, None, None]" if self.is_folded else f"{values}[:, None, None]"

    def pair_per_head(self, values: str) -> str:
        """[H, T, T] in the shape of scores."""
        return f"{values}.repeat(b, 1, 1)" if self.is_folded else values

    def cut(self, x: str, rows: str) -> str:
        """Rows of the sequence."""
        return f"{x}[{':, ' * self.time}{rows}]"


LAYOUTS = named_cases("layouts", globals())


@dataclass
class Writer:
    """Collects the lines of `__init__` and `forward`, and inputs besides ids and labels."""

    decoder: Decoder
    own: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.decoder.layout]

    @property
    def batch_first(self) -> tuple[str, str]:
        """`z` as [b t d], and the way back from there."""
        ways = {"time first": ("z.transpose(0, 1)", ".transpose(0, 1)"), "unbatched": ("z[None]", "[0]")}
        return ways.get(self.decoder.layout, ("z", ""))

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
        """A function that normalizes, as text; "" for none."""
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
