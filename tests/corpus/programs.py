"""Programs whose graphs the corpus has: types of the zoo, and random decoders of each kind."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import default_partition

from streamfx.options import resolve_options
from tests.corpus.entries import Entry
from tests.corpus.written import Plain, dtype_name, written, written_numbers
from tests.random_decoders.checking import executed
from tests.random_decoders.found import FOUND
from tests.support.exactness import Recorded, call, scalar_of
from tests.support.precision import default_dtype

ROWS = 5
EACH = 2  # random decoders of a kind
Source = list[Any]


@dataclass
class Captured(Recorded):
    """A compilation that keeps its joint graph as plain data, and runs AOTAutograd's partition of it: no pass runs."""

    written: Plain = None
    watches: tuple[int, ...] = ()

    def partition(self, joint: fx.GraphModule, joint_inputs: Any, **others: Any) -> Any:
        if isinstance(joint_inputs, tuple):
            static = others.get("static_lifetime_input_indices") or ()
            self.joint_arguments = len(joint_inputs[0]), others["num_fwd_outputs"], tuple(static)
            self.num_outputs = others["num_fwd_outputs"]
            self.watches = tuple(sorted(self.patterns(joint.graph, len(joint_inputs[0]))))
            self.joint, self.written = joint, written(joint)
        return default_partition(joint, joint_inputs, **others)

    def entry(self, name: str, source: Source, options: dict[str, Any]) -> Entry:
        primals, outputs, static = self.joint_arguments
        values = [*(self.primals or ()), *(self.tangents or ())]
        numbers = [written_numbers(value, position in static or position >= primals) for position, value in enumerate(values)]
        dtype = dtype_name(torch.get_default_dtype())
        return Entry(name, source, options, primals, outputs, list(static), list(self.watches), numbers, self.written, dtype)


@dataclass(frozen=True)
class Program:
    """A model, a step of it, and options."""

    model: Any
    step: Callable[[Any], Any]  # forward and backward, given the compiled model
    options: dict[str, Any]
    dynamic: bool | None = None
    dtype: torch.dtype = torch.float32  # the default dtype


def captured(source: Source) -> Iterator[Entry]:
    """The entries of a program's graphs; forward and backward run once, to record their inputs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch._dynamo.reset()
    program = PROGRAMS[source[0]](*source[1:])
    options, found = program.options, list[Captured]()

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(own := Captured(module, resolve_options({"outputs": "dense", **options})))
        return own.compile(inputs)

    with default_dtype(program.dtype):
        program.step(torch.compile(program.model, backend=backend, dynamic=program.dynamic))
    graphs = [one for one in found if one.written is not None and one.tangents is not None]
    name = name_of(source)
    for number, one in enumerate(graphs):
        with default_dtype(program.dtype):
            yield one.entry(name if len(graphs) == 1 else f"{name}-graph_{number}", source, options)


def _of_zoo(name: str, dynamic: bool = False) -> Program:
    from tests.zoo.models import built, dtype_of, grouped_products_in_float64, inputs

    grouped_products_in_float64()
    with default_dtype(dtype_of(name)):
        model = built(name)
        given = inputs(name, model)
    return Program(
        model, lambda compiled: scalar_of(call(compiled, given)).backward(), _in_chunks(ROWS), dynamic or None, dtype_of(name)
    )


def _random(kind: str, number: int = 0) -> Program:
    """A recorded decoder of a kind."""
    decoder = FOUND[kind][number]
    names = executed(decoder)
    inputs, reduce = names["inputs"], names["reduce"]
    options = {"chunk_size": decoder.chunk_size, "loss_chunk_size": decoder.loss_chunk_size}
    return Program(names["model"], lambda own: reduce(own(**inputs)).backward(), options, decoder.dynamic or None)


def _in_chunks(rows: int) -> dict[str, Any]:
    return {"chunk_size": rows, "loss_chunk_size": rows}


PROGRAMS: dict[str, Callable[..., Program]] = {"zoo": _of_zoo, "random": _random}
DYNAMIC = ("llama", "gemma2", "mixtral", "gpt2", "qwen3", "bart", "t5")  # with symbolic sizes, too
OMITTED = {"states", "views"}  # operators that tests register, nothing in loops


def name_of(source: Source) -> str:
    """The name of a program's entries.

    >>> name_of(["random", "known early"]), name_of(["zoo", "llama", True])
    ('random-known_early', 'zoo-llama-dynamic')
    """
    parts = ("dynamic" if part is True else str(part).replace(" ", "_") for part in source)
    return "-".join(parts)


def sources() -> Iterator[Source]:
    """All sources: types of transformers, and recorded decoders of each kind."""
    from tests.zoo.models import model_types

    yield from (["zoo", name] for name in model_types())
    yield from (["zoo", name, True] for name in DYNAMIC if name in model_types())
    for kind in sorted(FOUND.keys() - OMITTED):
        yield from (["random", kind, number] if number else ["random", kind] for number in range(len(FOUND[kind][:EACH])))
