"""What is trained: a decoder, its head and loss alone, its MLP alone. Each has a module, inputs by name, and a loss of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.losses import LOSSES, plain
from benchmarks.ways import Way
from examples.workload import small_config

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DOCUMENTS = 8


@dataclass(frozen=True)
class Workload:
    """`sizes` that are not given are the defaults; `feed` says what comes beside the tokens."""

    way: Way
    length: int
    sizes: dict[str, Any] = field(default_factory=dict)
    feed: str = "tokens"
    dtype: str = "float32"
    device: str = "cpu"

    @cached_property
    def module(self) -> Any:
        raise NotImplementedError

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def loss(self, **inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def compiled(self, backend: str, options: Mapping[str, Any]) -> Callable[..., Tensor]:
        """The loss, compiled."""
        made: Callable[..., Tensor] = torch.compile(self.loss, backend=backend, options=dict(options) or None)
        return made

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(self.device, TYPES[self.dtype])

    def tokens(self, vocabulary: int) -> Tensor:
        made = torch.randint(0, vocabulary, (1, self.length), generator=torch.Generator().manual_seed(0))
        return made.to(self.device)


class Decoder(Workload):
    """A Hugging Face decoder with random weights; `sizes` may name a `model`, else it is the small one, and change its sizes."""

    @cached_property
    def module(self) -> Any:
        return self.model

    @cached_property
    def model(self) -> Any:
        from transformers import AutoModelForCausalLM, logging

        logging.set_verbosity_error()
        torch.manual_seed(0)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(self.config, dtype=TYPES[self.dtype]).train()
        if self.way.checkpointing:
            reentrant = self.way.checkpointing == "reentrant"
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if self.way.mlp_parts > 1:
            for layer in model.model.layers:
                layer.mlp.forward = partial(in_parts, layer.mlp.forward, self.way.mlp_parts)
        return model

    @property
    def config(self) -> Any:
        from streamfx.tools.planner.models import configuration

        changes = {name: value for name, value in self.sizes.items() if name != "model"}
        if "model" not in self.sizes:
            return small_config(**changes)
        config = configuration(self.sizes["model"]).get_text_config()
        config.use_cache = False
        for name, value in changes.items():
            setattr(config, name, value)
        if "num_hidden_layers" in changes and getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: changes["num_hidden_layers"]]
        return config

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        ids = self.tokens(self.module.config.vocab_size)
        return {"input_ids": ids, "labels": ids, **self.beside()}

    def beside(self) -> dict[str, Tensor]:
        """What comes beside the tokens: nothing, a mask of ones, or the positions of packed documents."""
        if self.feed == "all-ones mask":
            return {"attention_mask": torch.ones(1, self.length, dtype=torch.int64, device=self.device)}
        if self.feed == "packed documents":
            own = torch.arange(-(-self.length // DOCUMENTS), device=self.device)
            return {"position_ids": own.repeat(DOCUMENTS)[None, : self.length]}
        return {}

    def loss(self, **inputs: Tensor) -> Tensor:
        if self.way.loss == "own":
            return self.module(**inputs).loss
        labels = inputs.pop("labels")
        hidden = self.module.model(**inputs).last_hidden_state
        return LOSSES[self.way.loss](hidden[:, :-1], self.module.lm_head.weight, labels[:, 1:])


def in_parts(mlp: Callable[[Tensor], Tensor], parts: int, x: Tensor) -> Tensor:
    """An MLP over parts of the rows, each of them checkpointed, as ALST's TiledMLP and Unsloth do."""
    return torch.cat([checkpoint(mlp, part, use_reentrant=False) for part in x.chunk(parts, 1)], 1)


class Preferences(Decoder):
    """DPO on a pair of sequences, or GRPO on two answers, with a reference model: `feed` says which."""

    @cached_property
    def module(self) -> nn.Module:
        return self.objective.step(self.model)

    @property
    def objective(self) -> Any:
        from streamfx.tools.planner.objectives import objective_by_name

        return objective_by_name(self.feed, group=2)

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(0)
        likes = self.objective.inputs(self.objective.sequences, self.length)
        made = {name: torch.rand(like.shape, generator=draw).to(self.device) for name, like in likes.items()}
        ids = torch.randint(0, self.model.config.vocab_size, made["ids"].shape, generator=draw)
        return {**made, "ids": ids.to(self.device)}

    def loss(self, **inputs: Tensor) -> Tensor:
        return self.module(**inputs)  # type: ignore[no-any-return]


class Head(Workload):
    """Hidden states, a head and the loss; gradients of both."""

    @cached_property
    def module(self) -> nn.Linear:
        width, vocabulary = self.sizes["width"], self.sizes["vocabulary"]
        torch.manual_seed(0)
        return nn.Linear(width, vocabulary, bias=False, device=self.device, dtype=TYPES[self.dtype])

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        hidden = self.random(1, self.length, self.sizes["width"]).requires_grad_()
        return {"hidden": hidden, "labels": self.tokens(self.sizes["vocabulary"])}

    def loss(self, **inputs: Tensor) -> Tensor:
        compute = LOSSES.get(self.way.loss, plain)
        return compute(inputs["hidden"], self.module.weight, inputs["labels"])


class Mlp(Workload):
    """A gated MLP between hidden states and the mean square of its results."""

    @cached_property
    def module(self) -> nn.ModuleDict:
        width, inner = self.sizes["width"], self.sizes["inner"]
        torch.manual_seed(0)
        shapes = {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
        layers = {name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()}
        return nn.ModuleDict(layers).to(self.device, TYPES[self.dtype])

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        return {"hidden": self.random(1, self.length, self.sizes["width"]).requires_grad_()}

    def loss(self, **inputs: Tensor) -> Tensor:
        hidden = inputs["hidden"]
        if self.way.name == "mini-sequences":
            parts = hidden.chunk(self.sizes["parts"], 1)
            made = torch.cat([checkpoint(self.mlp, part, use_reentrant=False) for part in parts], 1)
        elif self.way.checkpointing:
            made = checkpoint(self.mlp, hidden, use_reentrant=False)
        else:
            made = self.mlp(hidden)
        return made.float().square().mean()

    def mlp(self, hidden: Tensor) -> Tensor:
        gate, up, down = (self.module[name] for name in ("gate", "up", "down"))
        return down(F.silu(gate(hidden)) * up(hidden))


WORKLOADS: dict[str, type[Workload]] = {"decoder": Decoder, "preferences": Preferences, "head": Head, "mlp": Mlp}


def workload_called(name: str) -> type[Workload]:
    """One of `WORKLOADS`, or "TRL", which is looked up only when it is asked for: it needs TRL."""
    if name != "TRL":
        return WORKLOADS[name]
    from benchmarks.trainers import TrlStep

    return TrlStep
