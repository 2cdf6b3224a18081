"""Steps of real configurations for a GPU, traced without one: stages, kernels and chunks.

With a CUDA build of PyTorch, loop bodies become machine code for an H100, by the ptxas that Triton brings.
"""

from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.fake_cuda import COMPILER, reported
from tests.support.spread import only
from tests.support.tables import named_cases

pytestmark = [pytest.mark.compiled, pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")]

QWEN, GEMMA, OSS = "Qwen3-4B", "Gemma-3-1B", "GPT-OSS-20B"
SIZES = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 4096, "head_dim": 128}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192}
MISTRAL = {"model_type": "mistral", "sliding_window": 1024, **SIZES, **HEADS}
MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 128, "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_chunk_size": 128}
BAMBA = {"model_type": "bamba", "attn_layer_indices": [1], **SIZES, **HEADS, **MAMBA}
BLOCKS = "mixes blocks of rows of the sequence"  # the reason for states that a hybrid passes between blocks

CAUSAL, WINDOW, MASKED = ["causal"], ["window(1024)"], ["masked"]
LOCAL = ["causal", "window(512)"]  # of Gemma 3
SINKS = ["causal", "window(128)"]  # of GPT-OSS


class Case(NamedTuple):
    """Arguments; attention kernels of eager and of the loops; verdicts about masks.

    A mask that depends on data has no numbers here and is taken as a bias, where with its numbers it is taken apart. That of flex
    attention comes out of a graph of its own.
    """

    asked: dict[str, Any]
    eager: set[str]
    loops: set[str]
    seen: list[str]


FLASH_2, FLEX, T4 = {"attention": "flash_attention_2"}, {"attention": "flex_attention"}, {"device": "t4"}
PACKED, PADDED = {"given": "positions"}, {"given": "mask"}
EFFICIENT, FLASH, CUDNN, PLAIN = {"efficient"}, {"flash"}, {"cudnn"}, {"plain"}
HOPPER = CUDNN | EFFICIENT  # eager's choice there; the traced operator is never cuDNN's
CASES = named_cases("configurations", globals())
DEFAULT: tuple[str, ...] = ()  # each compiles a body of real size


@pytest.mark.parametrize("name", only(DEFAULT, CASES))
def test_real_configurations_stream(name: str) -> None:
    case = CASES[name]
    found = reported(length=4096, **case.asked)
    is_hybrid = case.asked["model"] is BAMBA
    assert not found["stopped"] and not found["failed"]
    assert not [reason for reason in found["reasons"] if not (is_hybrid and reason.endswith(BLOCKS))]
    assert found["streamed"] >= (0.99 if is_hybrid else 1)
    assert found["graphs"] == (1 if case.asked.get("attention") != "flex_attention" else found["graphs"])
    assert found["verdicts"] == case.seen
    assert (set(found["chosen"]), set(found["kernels"])) == (case.eager, case.loops)
    assert found["loops"] and all(loop["devices"] == ["cuda:0"] for loop in found["loops"])


LISTED = [("h100", 2, 8192), ("a100", 36, 8192), ("h100", 36, 131072)]


@pytest.mark.parametrize(("device", "layers", "length"), only([], LISTED))
def test_loops_of_qwen3(device: str, layers: int, length: int, golden: Any) -> None:
    """Chunks are equal, of whole tiles; no total of a product is zeroed; attention without a mask has the fastest kernel."""
    found = reported(model="Qwen3-8B", device=device, layers=layers, length=length)
    loops = found["loops"]
    assert all(loop["rows"] % 128 == 0 and loop["last"] == loop["rows"] for loop in loops)
    zeroed = {name for loop in loops for name, how in loop["sums"].items() if how == "zeroed"}
    assert all("embedding" in name for name in zeroed), zeroed  # rows of it may belong to no token
    assert set(found["kernels"]) == ({"cudnn"} if device == "h100" else {"flash"})
    golden("\n".join([*map(listed, loops), f"attention by {', '.join(found['kernels'])}", ""]))


def listed(loop: dict[str, Any]) -> str:
    sums = "".join(f"\n    {name}: {how}" for name, how in loop["sums"].items())
    return f"{loop['name']}: {loop['chunks']} chunks of {loop['rows']} rows{sums}"


@pytest.mark.long
@pytest.mark.parametrize(("kind", "length"), [("attention", 2048), ("recurrent", 128)])
def test_layers_on_two_devices_stream(kind: str, length: int) -> None:
    """Each stage streams on the device of its weights; values between devices are copied as in eager."""
    found = reported("two_devices", options={"chunk_size": 48, "offload": "inputs"}, kind=kind, length=length)
    assert not found["stopped"] and not found["reasons"] and found["graphs"] == 1 and found["streamed"] == 1
    for stage, device in (("layers_0", "cuda:0"), ("layers_3", "cuda:1"), ("head", "cuda:1")):
        loops = [own for name, own in found["devices"] if name.startswith(stage)]
        assert loops and all(own == [device] for own in loops), stage


PLANNED = {"Gemma-3-1B": "a100", "GPT-OSS-20B": "h100"}


@pytest.mark.long
@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_equals_a_trace_for_the_device(name: str) -> None:
    """It is traced on fake tensors of the CPU, and priced for another device."""
    asked: dict[str, Any] = {"model": name, "length": 4096, "device": PLANNED[name]}
    planned, traced = reported("planned", **asked), reported(**asked)
    assert planned["rows"] == [loop["rows"] for loop in traced["loops"] if loop["name"].endswith("_forward")]
    assert planned["peak"] == pytest.approx(traced["peak"], rel=1e-4)
    assert planned["flops"] == traced["flops"]
    for count in ("moved", "launches"):  # transformers makes a mask on some devices, which no loop needs
        assert planned[count] == pytest.approx(traced[count], rel=0.05)


BODIES: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {"model": "Qwen3-8B"},
    "GPT-OSS-20B": {"model": "GPT-OSS-20B"},
    "Gemma-3-12B": {"model": "Gemma-3-12B"},
    "Qwen3-8B, two lengths of chunks": {"model": "Qwen3-8B", "length": 9000},
}


@pytest.mark.skipif(torch.version.cuda is None or find_spec("triton") is None, reason="needs a CUDA build of PyTorch, and Triton")
@pytest.mark.parametrize("name", only(["Qwen3-8B"], BODIES))
def test_bodies_for_an_h100(name: str) -> None:
    """All kernels compile, none is timed on example arguments meanwhile, and a barrier separates the loops of a kernel."""
    parts = reported("bodies", **BODIES[name])["parts"]
    for part in parts:
        assert len(part["codes"]) >= part["kernels"] > 0 and all(part["codes"])
        assert not part["tuning"], "Inductor allocates example arguments, which no plan counts"
        assert not part["unguarded"], "a loop may read what another thread has yet to write in an earlier loop of its kernel"
    assert sum(part["loops"] for part in parts) > len(parts)
