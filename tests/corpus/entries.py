"""An entry of the corpus: a captured joint graph with its inputs, and the results of the passes."""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from streamfx.frontend.capture import initial_facts
from streamfx.frontend.mask_buffers import pattern_of
from streamfx.ir.facts import Facts
from streamfx.options import Options, resolve_options
from streamfx.passes import run_pipeline
from streamfx.passes.ops.traits import is_random
from streamfx.tools.report.notices import predicted
from streamfx.tools.report.printer import text_of
from streamfx.torch_private import mutated_inputs
from tests.corpus.written import Plain, numbers_of, read
from tests.support.exactness import Recorded, assert_small, value_errors
from tests.support.precision import default_dtype

FOLDER = Path(__file__).parent / "graphs"
KEPT = "found.json"
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Entry:
    """A joint graph of AOTAutograd, as plain data."""

    name: str
    source: list[Any]  # how it was captured, for `programs.py`
    options: dict[str, Any]
    primals: int  # number of inputs of the function; the others are tangents
    outputs: int  # number of results of the function; the others are gradients
    static: list[int]  # positions of weights and buffers
    watched: list[int]  # positions of inputs whose values the compiled graph depends on
    numbers: list[Plain] = field(repr=False)  # of primals and tangents
    graph: Plain = field(repr=False)
    dtype: str = "float32"  # the default dtype, of operators without one

    # -- files

    @staticmethod
    def all(folder: Path = FOLDER) -> list[str]:
        return sorted(path.stem for path in folder.glob("*.graph"))

    @staticmethod
    def load(name: str, folder: Path = FOLDER) -> Entry:
        return Entry(**json.loads(zlib.decompress((folder / f"{name}.graph").read_bytes())))

    @staticmethod
    def bytes_of(name: str, folder: Path = FOLDER) -> int:
        return (folder / f"{name}.graph").stat().st_size

    def save(self, folder: Path = FOLDER) -> None:
        folder.mkdir(exist_ok=True, parents=True)
        own = {key: value for key, value in asdict(self).items() if (key, value) != ("dtype", "float32")}
        text = json.dumps(own, separators=(",", ":"), sort_keys=True)
        (folder / f"{self.name}.graph").write_bytes(zlib.compress(text.encode(), 9))

    # -- the graph

    @cached_property
    def module(self) -> fx.GraphModule:
        return read(self.graph)

    @cached_property
    def values(self) -> list[Any]:
        """The primals and tangents, laid out as in the captured graph."""
        placeholders = self.module.graph.find_nodes(op="placeholder")
        given = [numbers_of(number, position) for position, number in enumerate(self.numbers)]
        return [_laid_out(value, node.meta.get("val")) for value, node in zip(given, placeholders, strict=True)]

    def initial_facts(self) -> Facts:
        patterns = {position: pattern_of(self.values[position]) for position in self.watched}
        known_masks = {position: pattern for position, pattern in patterns.items() if pattern is not None}
        mutated = mutated_inputs(self.module.graph)
        return initial_facts(self.module, self.primals, self.outputs, self.static, known_masks, mutated)

    def analysed(self, **options: Any) -> Facts:
        with default_dtype(getattr(torch, self.dtype)):
            return run_pipeline(self.initial_facts, resolve_options({**self.options, **options}))

    def recorded(self) -> Recorded:
        """A compilation that replays the graph."""
        recorded = Recorded(self.module, Options())
        recorded.joint, recorded.joint_arguments = self.module, (self.primals, self.outputs, tuple(self.static))
        recorded.primals, recorded.tangents = self.values[: self.primals], self.values[self.primals :]
        return recorded

    def draws(self) -> bool:
        """Whether the graph draws random numbers, which differ between runs."""
        return any(map(is_random, self.module.graph.nodes))

    def check(self, facts: Facts, tolerance: float = TOLERANCE) -> None:
        """Assert that the rewritten program has the results of the graph."""
        if facts.program is None or self.draws():
            return
        recorded = self.recorded()
        with default_dtype(getattr(torch, self.dtype)):
            errors = value_errors(recorded.streamed_values(facts.program), recorded.joint_values(), self.outputs)
        assert_small(errors, tolerance, self.name)


def _laid_out(value: Any, like: Any) -> Any:
    """A tensor with the strides of another; rows share their numbers if a stride is zero."""
    if not isinstance(value, Tensor) or not isinstance(like, Tensor):
        return value
    strides, shape = [int(stride) for stride in like.stride()], value.shape
    for dim, stride in enumerate(strides):
        value = value.narrow(dim, 0, 1) if stride == 0 and shape[dim] > 1 else value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value).expand(shape)


@dataclass(frozen=True)
class Found:
    """Results of the passes for a graph."""

    loops: list[list[Any]]  # name, rows of a chunk, numbers of inputs, of outputs, and of operators in the body
    outer: list[int]  # numbers of operators in the host programs
    saved: int
    flops: int | None  # None: not requested; simulating a step takes longer than all passes
    peak: int | None
    masks: dict[str, int]
    reasons: list[str]
    listing: str = field(repr=False)

    @staticmethod
    def of(facts: Facts, costs: bool = True) -> Found:
        program = facts.program
        key_spans = facts.found_key_spans
        masks = sorted(key_spans.span_kinds.values()) if key_spans is not None else []
        counts = {mask: masks.count(mask) for mask in masks}
        if program is None:
            return Found([], [], 0, 0, 0, counts, facts.reasons(), "")
        loops = [
            [loop.spec.name, str(loop.spec.chunk_size), len(loop.spec.feeds), len(loop.spec.yields), len(loop.body.graph.nodes)]
            for loop in program.loops
        ]
        graphs = [module for module in (program.forward, program.backward) if module is not None]
        cost = predicted(facts) if costs else None
        flops, peak = (cost.flops, cost.peak) if cost is not None else (None, None)
        outer = [len(module.graph.nodes) for module in graphs]
        return Found(loops, outer, len(program.saved), flops, peak, counts, facts.reasons(), text_of(facts, "build_program"))

    @property
    def plain(self) -> dict[str, Any]:
        """For a file: requested results, and the digest of the listing."""
        own = {key: value for key, value in asdict(self).items() if value is not None}
        listing = own.pop("listing")
        return {**own, "listing": hashlib.sha256(listing.encode()).hexdigest()[:16]}


# -- the kept file


def kept_in(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Results of the passes in the file, by the name of the graph."""
    file = folder.parent / KEPT
    return json.loads(file.read_text()) if file.exists() else {}


def keep(found: dict[str, dict[str, Any]], folder: Path = FOLDER) -> None:
    """Write the file: one line per graph, sorted."""
    lines = (f"{json.dumps(name)}: {json.dumps(found[name], sort_keys=True)}" for name in sorted(found))
    (folder.parent / KEPT).write_text("{\n" + ",\n".join(lines) + "\n}\n")
