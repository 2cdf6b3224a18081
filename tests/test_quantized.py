"""Quantized base weights under adapters: exact, in one graph, streamed, and unpacked no more than a few layers at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

import streamfx
from streamfx.cost.meter import Meter
from streamfx.integrations import enable
from streamfx.passes.ops.rules.packed_weights import packed_product
from streamfx.passes.ops.rules.registry import RULES_BY_NAME
from tests.support.tables import named_cases
from tests.support.trainers import tiny

pytestmark = pytest.mark.long

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LAYERS = 4


@torch.library.custom_op("streamfx_tests::unpacked", mutates_args=())
def unpacked(packed: Tensor, scale: Tensor) -> Tensor:
    return packed * scale


@torch.library.custom_op("streamfx_tests::packed_linear", mutates_args=())
def packed_linear(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    return x @ (packed * scale).T


unpacked.register_fake(lambda packed, scale: scale.new_empty(packed.shape))
packed_linear.register_fake(lambda x, packed, scale: x.new_empty(*x.shape[:-1], packed.shape[0]))
packed_linear.register_autograd(
    lambda ctx, gradient: (gradient @ unpacked(*ctx.weight), None, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "weight", inputs[1:]),
)
PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "by hand": lambda x, packed, scale: F.linear(x, packed * scale),
    "by hand, operator": packed_linear,
    "by hand, unpacking": lambda x, packed, scale: F.linear(x, unpacked(packed, scale)),
}


class Packed(nn.Module):
    """A weight in 8 bits with a scale for each row, unpacked when it is used, and a trained product of low rank that is added.

    It is packed in inference mode, as some libraries do: autograd saves no such tensors.
    """

    def __init__(self, linear: nn.Linear, product: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.product, weight = product, linear.weight.detach()
        with torch.inference_mode():
            self.scale = weight.abs().amax(1, keepdim=True) / 127
            self.packed = (weight / self.scale).round().to(torch.int8)
        self.down = nn.Parameter(0.1 * torch.randn(4, weight.shape[1], dtype=weight.dtype))
        self.up = nn.Parameter(0.1 * torch.randn(weight.shape[0], 4, dtype=weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.packed, self.scale) + x @ self.down.T @ self.up.T


def made(dtype: torch.dtype, replaced: Callable[[nn.Linear], Any] | None = None) -> Any:
    """A model, whose projections may be others."""
    model: Any = tiny.causal_model(num_hidden_layers=LAYERS).to(dtype).requires_grad_(False)
    for parent in list(model.modules()) if replaced is not None else ():
        for name, child in list(parent.named_children()):
            if name in PROJECTIONS:
                setattr(parent, name, replaced(child))  # type: ignore[misc]
    return model


def bitsandbytes(folder: Path, dtype: torch.dtype, layers: int = LAYERS, **options: Any) -> Any:
    """As users load it: a folder with plain weights, quantized by transformers."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if not (folder / "plain").exists():
        plain: Any = tiny.causal_model(num_hidden_layers=layers)
        plain.save_pretrained(folder / "plain")
    config = BitsAndBytesConfig(**options)
    loaded = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=dtype, quantization_config=config, device_map="cpu")
    return loaded.train()


def torchao(dtype: torch.dtype) -> Any:
    pytest.importorskip("torchao", minversion="0.16", reason="PEFT takes torchao 0.16 or later")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = made(dtype)
    quantize_(model.model, Int8WeightOnlyConfig())
    return model


def hqq(dtype: torch.dtype) -> Any:
    """Its weights are created in inference mode: autograd would not save them."""
    quantize = pytest.importorskip("hqq.core.quantize", reason="hqq is not installed")
    config = quantize.BaseQuantizeConfig(nbits=4, group_size=16)
    return made(dtype, lambda child: quantize.HQQLinear(child, config, compute_dtype=dtype, device="cpu"))


def quanto(dtype: torch.dtype, bits: str) -> Any:
    optimum = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    model = made(dtype)
    optimum.quantize(model.model, weights=getattr(optimum, bits))
    optimum.freeze(model.model)
    return model


@pytest.fixture
def peft(monkeypatch: pytest.MonkeyPatch) -> Any:
    """PEFT, where a torchao that is too old for it is not looked at."""
    module = pytest.importorskip("peft")
    try:
        module.import_utils.is_torchao_available()
    except ImportError:
        monkeypatch.setattr("peft.tuners.lora.torchao.is_torchao_available", lambda: False)
    return module


def adapted(model: Any, peft: Any) -> Any:
    """With adapters that do something from the start; of the base model's type."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    own = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    for name, parameter in own.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(model.lm_head.weight.dtype)
    return own


EIGHT: dict[str, Any] = {"load_in_8bit": True}
FOUR: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32, "bnb_4bit_quant_type": "nf4"}
KINDS: dict[str, tuple[Callable[[Path, torch.dtype], Any], torch.dtype]] = named_cases("kinds", globals())


@pytest.mark.parametrize("kind", [*PRODUCTS, *KINDS])
def test_quantized_base_weights(kind: str, tmp_path: Path, peft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES_BY_NAME, "streamfx_tests::packed_linear", packed_product)
    streamfx.register_rule(unpacked, "o k, o l! -> o k")
    make, dtype = KINDS.get(kind, (None, torch.float64))
    model = made(dtype, lambda child: Packed(child, PRODUCTS[kind])) if make is None else adapted(make(tmp_path, dtype), peft)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    ids = torch.randint(8, 60, (1, 12))

    def step() -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    truth, gradients = step()
    counter = torch._dynamo.utils.counters
    counter.clear()
    with enable(model, chunk_size=7, loss_chunk_size=7, strict=True) as done:  # an error if anything runs whole
        loss, found = step()
        with Meter() as meter:
            step()
    assert counter["stats"]["unique_graphs"] == 1 and done.calls["model"].counts.compiled == 2
    assert abs(loss - truth) <= 1e-6 * abs(truth) and len(found) == len(gradients) > LAYERS
    for ours, theirs in zip(found, gradients, strict=True):
        assert (ours - theirs).norm() <= tolerance * theirs.norm()
    in_full = LAYERS * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32) * dtype.itemsize
    assert meter.peak < (0.9 if kind == "hqq int4" else 0.8) * in_full, "weights are unpacked where they are used"


def test_explain_leaves_packed_weights_unchanged(tmp_path: Path, peft: Any) -> None:
    """A packed weight stores its scales with its values: tracing without data leaves it unchanged."""
    model = adapted(bitsandbytes(tmp_path, torch.float32, 1, **FOUR), peft)
    ids = torch.randint(8, 60, (1, 12))
    weight = model.base_model.model.model.layers[0].mlp.up_proj.weight
    report = streamfx.explain(model, input_ids=ids, labels=ids, use_cache=False, options={"chunk_size": 7}).summary()
    assert report["graphs"] == 1 and not report["graph_breaks"] and not report["stopped"]
    assert all(stage["kind"] != "whole" for stage in report["stages"])
    assert model.base_model.model.model.layers[0].mlp.up_proj.weight is weight
