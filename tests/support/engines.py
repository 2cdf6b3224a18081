"""Models as engines of distributed training get them, ways to hand them over, and training against one process."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from streamfx.frontend.backend import streambp
from streamfx.integrations import EnabledModules, calls, enable, parts
from tests.support.collectives import Step, data_of, one_process, step, worst
from tests.support.sharded import Decoder, Layer

LENGTH, CHUNK, TOLERANCE = 29, 8, 1e-12
OPTIONS: dict[str, Any] = {"chunk_size": CHUNK, "loss_chunk_size": CHUNK, "check_passes": True}
COLUMNS, ROWS = ("q", "k", "v", "up"), ("out", "down")


class Masked(Layer):
    """A layer with a mask in a buffer, and a number of its own."""

    mask: Tensor

    def __init__(self, width: int, number: int) -> None:
        """The first and the third are alike; the second differs in its mask, the fourth in its number, too."""
        super().__init__(width)
        rows, window = torch.arange(LENGTH), (3, 8, 3, 4)[number]
        self.register_buffer("mask", (rows[:, None] >= rows) & (rows[:, None] - rows < window))
        self.times = window % 5

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask) * self.times


class Body(nn.Module):
    """Layers in a loop of a module of their own, as most libraries write it."""

    def __init__(self, layers: int, width: int, vocabulary: int, layer: Callable[[int, int], Layer]) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocabulary, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(layer(width, number) for number in range(layers))
        self.is_checkpointed = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return self.norm(x)  # type: ignore[no-any-return]


class Nested(nn.Module):
    """A body, and a head with a loss behind it; without labels, logits."""

    def __init__(
        self,
        layers: int = 2,
        width: int = 8,
        vocabulary: int = 17,
        tied: bool = False,
        layer: Callable[[int, int], Layer] = lambda width, number: Layer(width),
    ) -> None:
        super().__init__()
        self.body, self.head = Body(layers, width, vocabulary, layer), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.body.embed.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.head(self.body(ids))
        return logits if labels is None else loss_of(logits, labels)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, Layer)]


def twins(make: Callable[[], Any] = Nested) -> tuple[Any, Any]:
    """A model in float64, and a copy that stays as it is."""
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = make()
    return model, copy.deepcopy(model)


# -- ways to hand a model over


def all_ranks() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="streambp", options={**OPTIONS, **options})


def enabled(model: Any) -> EnabledModules:
    return enable(model, **OPTIONS)


def checkpointed(model: nn.Module) -> nn.Module:
    """Layers that make their activations again in eager."""
    for module in model.modules():
        if isinstance(module, (Body, Decoder)):
            module.is_checkpointed = True
    return model


def wrapped(model: nn.Module, mesh: DeviceMesh | None = None, **policies: Any) -> nn.Module:
    """By FSDP2: each layer, and the rest."""
    for module in (*layers_of(model), model):
        fully_shard(module, mesh=mesh or all_ranks(), **policies)
    return model


def cut_layers(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """By heads and columns."""
    plan: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    for layer in layers_of(model):
        parallelize_module(layer, mesh, plan)
    return model


def cut(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    """Layers by heads and columns; embedding, head and loss by words."""
    mesh = mesh or all_ranks()
    words: dict[str, Any] = {"embed": RowwiseParallel(input_layouts=Replicate())}
    words["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return parallelize_module(cut_layers(model, mesh), mesh, words)


# -- against one process


def trained(
    make: Callable[[], nn.Module],
    engine: Callable[[Any], Any],
    rank: int,
    micro: int = 1,
    groups: int | None = None,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    shorter: int = 0,
) -> float:
    """The largest error of a gradient in two steps of training, of `micro` batches each; groups of ranks have data in common.

    Each rank has `shorter` fewer rows than the one before it.
    """
    model, truth = twins(make)
    run, world = engine(model), groups or dist.get_world_size()
    own, found = rank * world // dist.get_world_size(), list[float]()
    optimizers = [kind(each.parameters(), 0.5) for each in (run, truth)]
    for _ in range(2):
        run.zero_grad()
        one_process(truth, LENGTH, world, micro, shorter)
        for part in range(micro):
            is_last = part == micro - 1  # gradients of all batches are reduced with those of the last one
            if hasattr(run, "set_requires_gradient_sync"):
                run.set_requires_gradient_sync(is_last)
            with run.no_sync() if hasattr(run, "no_sync") and not is_last else nullcontext():
                (run(*data_of(world * part + own, LENGTH - shorter * own)) * (own + 1)).backward()
        found.append(worst(model, truth))
        for optimizer in optimizers:
            optimizer.step()
    return max(found)


def in_eager(model: nn.Module, truth: nn.Module, groups: int | None = None, length: int = 4 * CHUNK) -> Step:
    """A step with checkpointed layers."""
    return step(checkpointed(model), model, truth, length, groups)


@contextmanager
def graphs_seen() -> Iterator[list[list[str]]]:
    """The operators of each graph that Dynamo makes for enabled modules."""
    seen: list[list[str]] = []

    def noted(module: Any, inputs: Any, **options: Any) -> Any:
        nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
        seen.append([getattr(node.target, "__name__", str(node.target)) for node in nodes])
        return streambp(module, inputs, **options)

    with mock.patch.object(calls, "streambp", noted), mock.patch.object(parts, "streambp", noted):
        yield seen
