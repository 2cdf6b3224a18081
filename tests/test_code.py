"""The rewritten step as one Python module computes what eager does; it shows the keys of a chunk and the sums of gradients."""

import logging
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamfx
from streamfx.errors import ReportError
from streamfx.log import pass_log
from streamfx.passes import pipeline
from streamfx.tools.report.as_python.module_globals import ModuleGlobals, NotWritten
from streamfx.tools.report.printer import show_product
from tests.support import hf
from tests.support.decoders import Plain, Window, made
from tests.support.small import EXAMPLES
from tests.zoo import models as zoo

pytestmark = pytest.mark.compiled

IDS = torch.arange(48).view(2, 24) * 7 % 19
LABELLED = {"input_ids": IDS, "labels": IDS}
OPTIONS = {"chunk_size": 8, "loss_chunk_size": 8}


def explained(model: nn.Module, inputs: dict[str, Any], **options: Any) -> streamfx.Explanation:
    return streamfx.explain(model, options=OPTIONS | options, **inputs)


def assert_equals_eager(model: nn.Module, inputs: dict[str, Any], **options: Any) -> str:
    """Run the module of the model's step; its loss and all its gradients must be eager's. Return its text."""
    text = explained(model, inputs, **options).code()
    module: dict[str, Any] = {}
    exec(compile(text, "code", "exec"), module)
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False)), **inputs}
    outputs, gradients = module["step"](*(held[name].detach().clone() for name in module["INPUTS"]))
    loss = model(**inputs)
    loss.backward()
    torch.testing.assert_close(outputs[0], loss.detach())
    found = {id(held[name]): gradient for name, gradient in zip(module["INPUTS"], gradients, strict=True) if gradient is not None}
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    assert trained
    for parameter in trained:
        torch.testing.assert_close(found[id(parameter)], parameter.grad, rtol=1e-7, atol=1e-12)
    return text


@pytest.fixture(scope="module")
def explanation() -> streamfx.Explanation:
    example = EXAMPLES["causal"]
    return streamfx.explain(example.model(), *example.arguments(), chunk_size=example.chunk_size, loss_chunk_size=2)


def test_the_code_of_a_step_equals_eager_and_shows_keys_and_sums() -> None:
    text = assert_equals_eager(EXAMPLES["causal"].model().double(), {"ids": IDS % 11, "labels": IDS % 11})
    backward = text[text.index("_backward_1(") : text.index("INPUTS = ")]
    assert "for start in reversed(range(0, length, chunk_size)):" in backward
    assert re.search(r"key ?= ?key_all\[:, :, :stop\]", backward) and "grad_key_all[:, :, :stop] += grad_key" in backward
    assert re.search(r"grad_k_weight = torch.zeros.*for start.*grad_k_weight \+= \w+.t\(\) @", backward, re.S)
    assert "# backward of small.py:" in backward and "F.scaled_dot_product_attention(q, k, v, is_causal=True)" in backward


def test_one_stage_or_half_has_only_its_functions(explanation: streamfx.Explanation) -> None:
    text = explanation.code(stage=0, half="forward")
    assert text.count("\ndef ") == 1 and "reversed" not in text and "INPUTS" not in text
    assert explanation.code(explanation.stages[0].name, "forward") == text
    functions = explanation.code().split("\n\n\n")
    for selected in (text, explanation.code(half="forward"), explanation.code(half="backward"), explanation.code(0, "backward")):
        written = selected.rstrip().split("\n\n\n")[1:]
        assert written and {function.rstrip() for function in written} <= {function.rstrip() for function in functions}
    for wrong in ({"stage": "nothing"}, {"stage": 9}, {"half": "both"}):
        with pytest.raises(ReportError, match="code takes"):
            explanation.code(**wrong)


@pytest.mark.long
def test_a_window_is_a_slice_and_equal_layers_share_their_functions() -> None:
    text = assert_equals_eager(made(Window), {"ids": IDS, "labels": IDS})
    assert "first = max(start - 4, 0)" in text and re.search(r"@ \w+\[:, :, first:stop\]", text)
    text = explained(made(lambda: Plain(layers=5)), {"ids": IDS, "labels": IDS}).code()
    assert re.search(r'"""Run .* 3 like it, ', text) and text.count("for start in range(0, length, chunk_size):") == 3


def test_an_object_without_text_raises_an_error_that_names_it() -> None:
    for use in (lambda it: it(1), lambda it: it.resume, lambda it: torch.ones(2) + it):
        with pytest.raises(ReportError, match="needs a mesh"):
            use(NotWritten("a mesh"))


def test_objects_without_text_have_globals_of_their_own() -> None:
    """A reader sets each to its object."""
    module, one, other = ModuleGlobals(lambda graph, is_mask: ""), torch.zeros(300), torch.ones(300)
    assert module.text(one) == module.text(one) != module.text(other)


def test_names_that_need_escapes_and_models_whose_parameters_have_equal_names() -> None:
    odd = 'it\'s "odd" [(\\' + '"""' + "\n{name}" + 20 * " x"
    student, teacher = (nn.Sequential(OrderedDict({odd: nn.Linear(8, 8), "class": nn.Linear(8, 8)})) for _ in range(2))
    x = torch.randn(1, 16, 8)
    text = streamfx.explain(lambda x: (student(x) - teacher(x)).square().sum(), x, chunk_size=4).code()
    module: dict[str, Any] = {}
    exec(compile(text, "code", "exec"), module)
    models = {"student": student, "teacher": teacher}
    held = {f"{name}.{path}": weight for name, model in models.items() for path, weight in model.named_parameters()} | {"x": x}
    _, gradients = module["step"](*(held[name].detach() for name in module["INPUTS"]))
    (student(x) - teacher(x)).square().sum().backward()
    found = dict(zip(module["INPUTS"], gradients, strict=True))
    for name, weight in held.items():
        torch.testing.assert_close(found[name], weight.grad)


@pytest.mark.parametrize("name", ["llama", "gpt2", "packed", "mixtral", "mamba", "t5"])
@pytest.mark.long
def test_the_code_of_a_decoder_equals_eager(name: str) -> None:
    model, inputs = DECODERS[name]()
    assert_equals_eager(hf.LossOf(model), inputs)


def _of_zoo(name: str) -> tuple[nn.Module, dict[str, Any]]:
    zoo.grouped_products_in_float64()
    return zoo.built(name), LABELLED


def _encoder_decoder() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 23, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)).double(), LABELLED


def _packed() -> tuple[nn.Module, dict[str, Any]]:
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None].repeat(2, 1)
    return hf.made("llama"), {**LABELLED, "position_ids": positions}


DECODERS: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "llama": lambda: (hf.made("llama", num_hidden_layers=4), LABELLED),
    "gpt2": lambda: (hf.made("gpt2"), LABELLED),
    "packed": _packed,
    "mixtral": lambda: _of_zoo("mixtral"),
    "mamba": lambda: _of_zoo("mamba"),
    "t5": _encoder_decoder,
}


@pytest.mark.long
@pytest.mark.parametrize("options", [{"offload": "inputs"}, {"keep_every": 2}, {"save": "inputs"}, {"gradients": "at once"}])
def test_the_code_of_other_plans_equals_eager(options: dict[str, Any]) -> None:
    assert_equals_eager(made(Plain), {"ids": IDS, "labels": IDS}, **options)


def test_the_difference_of_two_passes_is_what_they_changed(explanation: streamfx.Explanation) -> None:
    passes = explanation.passes()
    assert passes[:4] == ["unshard", "canonicalize", "recurrences", "axes"] and "build_program" in passes
    changed = explanation.diff("unshard", "canonicalize")
    assert re.search(r"^-.*_scaled_dot_product_\w+\(", changed, re.M) and re.search(r"^\+.*streamfx.attention\(", changed, re.M)
    partition = explanation.diff("axes", "partition")
    assert partition.startswith("--- after axes\n+++ after budget_search\n") and "+stage 1 of 2   forward" in partition
    assert explanation.diff("axes", "axes") == ""
    with pytest.raises(ReportError, match="names of passes"):
        explanation.diff("axes", "nothing")


def test_logs_of_selected_passes(
    explanation: streamfx.Explanation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STREAMFX_LOGS", "partition, key_spans, misspelt")
    monkeypatch.setattr(pass_log(), "propagate", True)
    facts = explanation.call.graphs[0].facts
    with caplog.at_level(logging.DEBUG, "streamfx"):
        for applied_pass in pipeline(explanation.call.options):
            show_product(applied_pass, facts)
    shown = re.findall(r"after (\w+):\n", caplog.text)
    assert shown == ["key_spans", "stages", "loss_gradient", "chunk_plan", "budget_search"]
    assert "no pass is named misspelt" in caplog.text


def test_diagrams_are_written_to_files(explanation: streamfx.Explanation, tmp_path: Path) -> None:
    for write in (explanation.to_mermaid, explanation.to_dot):
        text = write(tmp_path / "diagram")
        assert (tmp_path / "diagram").read_text() == text == write()
