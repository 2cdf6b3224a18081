"""Steps of real configurations as they are on a GPU, traced without one: what streams, by which kernels, in which chunks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from streamfx.options import OFFLOADS
from tests.support import fake_cuda
from tests.support.fake_cuda import COMPILER, private_folder, reported

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

QWEN, LLAMA, GEMMA, OSS = "Qwen3-4B", "Llama-3.1-8B", "Gemma-3-1B", "GPT-OSS-20B"
SIZES = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 4096, "head_dim": 128}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192}
MISTRAL = {"model_type": "mistral", "sliding_window": 1024, **SIZES, **HEADS}
MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 128, "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_chunk_size": 128}
BAMBA = {"model_type": "bamba", "attn_layer_indices": [1], **SIZES, **HEADS, **MAMBA}
BLOCKS = "mixes blocks of rows of the sequence"  # what a hybrid says of the states that it hands from block to block

CAUSAL, WINDOW, MASKED = ["causal"], ["window(1024)"], ["masked"]
LOCAL = ["causal", "window(512)"]  # of Gemma 3
SINKS = ["causal", "window(128)"]  # of GPT-OSS


class Case(NamedTuple):
    """What is asked; the kernels that eager's attention would be; those of the loops; what rows see.

    A mask that depends on data has no numbers here and is taken as a bias, where with its numbers it is taken apart, or, if they
    are said to be documents, as these.
    """

    asked: dict[str, Any]
    eager: set[str]
    loops: set[str]
    seen: list[str]


def sdpa(model: Any, eager: str, loops: str, seen: list[str], **more: Any) -> Case:
    """`eager` is the kernel that eager takes; what is traced is never cuDNN's operator."""
    return Case({"model": model, **more}, {eager, "efficient"} if eager == "cudnn" else {eager}, {loops}, seen)


def flash(model: Any, loops: set[str], seen: list[str], **more: Any) -> Case:
    """The flash-attn package's operators; a batch of one row as an enabled model has it."""
    return Case({"model": model, "attention": "flash_attention_2", **more}, set(), loops, seen)


def flex(model: Any, loops: set[str], seen: list[str], **more: Any) -> Case:
    """Its mask comes out of a graph of its own, and is looked at when it has numbers, which here it has not."""
    return Case({"model": model, "attention": "flex_attention", **more}, set(), loops, seen)


AT_THE_END = {"efficient, at the end"}
LAST = {"efficient"} | AT_THE_END  # the first chunk is square
EFFICIENT, FLASH, CUDNN, PLAIN = {"efficient"}, {"flash"}, {"cudnn"}, {"plain"}
CASES = {
    "Qwen3 on an H100": sdpa(QWEN, "cudnn", "cudnn", CAUSAL),
    "Qwen3 on an A100": sdpa(QWEN, "efficient", "flash", CAUSAL, device="a100"),  # a mask is traced, and a loop needs none
    "Qwen3 with padding": sdpa(QWEN, "cudnn", "efficient", CAUSAL, given="mask"),
    "Qwen3 packed": sdpa(QWEN, "cudnn", "efficient", MASKED, given="positions"),
    "Llama": sdpa(LLAMA, "cudnn", "cudnn", CAUSAL),
    "Llama on an A100, with padding": sdpa(LLAMA, "efficient", "efficient", CAUSAL, device="a100", given="mask"),
    "Mistral": sdpa(MISTRAL, "cudnn", "flash", WINDOW),
    "Mistral with padding": sdpa(MISTRAL, "cudnn", "efficient", WINDOW, given="mask"),
    # on a T4 eager spells attention out, since no kernel takes bfloat16, and so does a loop
    "Qwen3 on a T4": Case({"model": QWEN, "device": "t4"}, {"math"}, set(), CAUSAL),
    "Llama on a T4, packed": Case({"model": LLAMA, "device": "t4", "given": "positions"}, {"math"}, set(), MASKED),
    "Llama on a T4, in float16": Case({"model": LLAMA, "device": "t4", "dtype": "float16"}, EFFICIENT, LAST, CAUSAL),
    "Mistral on a T4, in float16": Case({"model": MISTRAL, "device": "t4", "dtype": "float16"}, EFFICIENT, AT_THE_END, WINDOW),
    "Gemma 3": Case({"model": GEMMA}, EFFICIENT, FLASH, LOCAL),
    "Gemma 3 packed": Case({"model": GEMMA, "given": "positions"}, EFFICIENT, EFFICIENT, MASKED),
    # GPT-OSS has no `sdpa`, and flash attention's newer packages alone know its sinks
    "GPT-OSS": Case({"model": OSS}, set(), FLASH | CUDNN, SINKS),
    "GPT-OSS with padding": Case({"model": OSS, "given": "mask"}, set(), EFFICIENT, MASKED),
    "GPT-OSS on a T4": Case({"model": OSS, "device": "t4"}, set(), PLAIN, SINKS),
    "Qwen3 with flash attention": flash(QWEN, CUDNN, CAUSAL),
    "Qwen3 with flash attention, several": flash(QWEN, CUDNN, CAUSAL, batch=2),
    "Qwen3 with flash attention, packed": flash(QWEN, EFFICIENT, CAUSAL, given="positions"),
    "Qwen3 packed, with its numbers": sdpa(QWEN, "cudnn", "flash", MASKED, given="positions", documents=True),
    "Gemma 3 packed, with its numbers": Case({"model": GEMMA, "given": "positions", "documents": True}, EFFICIENT, FLASH, MASKED),
    "Qwen3 with flash attention, packed by the caller": flash(QWEN, EFFICIENT, MASKED, given="ends"),
    "Llama with flash attention on an A100": flash(LLAMA, FLASH, CAUSAL, device="a100"),
    "Llama with flash attention on a T4": flash(LLAMA, PLAIN, CAUSAL, device="t4"),
    "Gemma 3 with flash attention": flash(GEMMA, FLASH, LOCAL),
    "Gemma 3 with flash attention, packed": flash(GEMMA, EFFICIENT, LOCAL, given="positions"),
    "Mistral with flash attention": flash(MISTRAL, FLASH, WINDOW),
    "Mistral with flash attention, packed": flash(MISTRAL, EFFICIENT, WINDOW, given="positions", device="a100"),
    "Qwen3 with flex attention": flex(QWEN, EFFICIENT, MASKED),
    "Qwen3 with flex attention, padded": flex(QWEN, EFFICIENT, CAUSAL, given="mask"),
    "Qwen3 with flex attention, packed": flex(QWEN, EFFICIENT, MASKED, given="positions"),
    "Llama with flex attention on a T4": flex(LLAMA, PLAIN, MASKED, device="t4"),
    "Gemma 3 with flex attention": flex(GEMMA, EFFICIENT, MASKED),
    "Mistral with flex attention": flex(MISTRAL, EFFICIENT, MASKED, device="a100"),
    "GPT-OSS with flex attention": flex(OSS, set(), SINKS),
    "GPT-OSS with flex attention, packed": flex(OSS, set(), SINKS, given="positions"),
    "a hybrid": sdpa(BAMBA, "cudnn", "cudnn", CAUSAL),
    "a hybrid with padding": sdpa(BAMBA, "efficient", "efficient", CAUSAL, given="mask", device="a100"),
    "a hybrid with flash attention": flash(BAMBA, CUDNN, CAUSAL),
    "a hybrid with flash attention, packed": flash(BAMBA, EFFICIENT, CAUSAL, given="positions"),
    "a hybrid on a T4": Case({"model": BAMBA, "device": "t4"}, {"math"}, set(), CAUSAL),
}
DEFAULT = ("Qwen3 on an H100", "Qwen3 with flash attention, packed")


@pytest.mark.parametrize("name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.long) for name in CASES])
def test_all_of_it_streams(name: str) -> None:
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


LISTED = [
    ("h100", 2, 8192),
    *((device, 36, length) for device, length in (("a100", 8192), ("h100", 8192), ("h100", 32768), ("h100", 131072))),
]


@pytest.mark.parametrize(
    ("device", "layers", "length"),
    [case if case == LISTED[0] else pytest.param(*case, marks=pytest.mark.long) for case in LISTED],
)
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


def of_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)


def open_to_others(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.mkdir()
    path.chmod(0o770)


def a_link(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = path.with_name("own")
    own.mkdir(mode=0o700)
    path.symlink_to(own)


@pytest.mark.parametrize("prepare", [of_another_user, open_to_others, a_link])
def test_no_library_is_loaded_from_a_folder_of_others(prepare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user can make a folder with a name that is known before; libraries in it would run in this user's processes."""
    path = tmp_path / "streamfx-tests"
    prepare(path, monkeypatch)
    with pytest.raises(PermissionError, match=r"of user \d+ alone"):
        private_folder(path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = fake_cuda._kept_folder("libraries")
    assert tmp_path not in found.parents
    assert (found.stat().st_mode & 0o777, list(found.iterdir())) == (0o700, [])


def test_libraries_are_kept_in_a_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, second = (fake_cuda._kept_folder("libraries") for _ in range(2))
    assert first == second == tmp_path / "cache/streamfx-tests/libraries"
    assert first.stat().st_mode & 0o777 == first.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, *({"chunk_size": 96, "offload": offload} for offload in OFFLOADS)], ids=str)
def test_layers_on_two_devices(options: dict[str, Any]) -> None:
    """Each stage streams where its weights are; what crosses is copied as in eager."""
    found = reported("two_devices", options=options)
    assert not found["stopped"] and not found["reasons"] and found["graphs"] == 1 and found["streamed"] == 1
    for stage, device in (("layers_0", "cuda:0"), ("layers_3", "cuda:1"), ("head", "cuda:1")):
        loops = [devices for name, devices in found["devices"] if name.startswith(stage)]
        assert loops and all(devices == [device] for devices in loops), stage


@pytest.mark.long
def test_recurrent_layers_on_two_devices() -> None:
    """Nothing keeps them from sharing a loop: a chunk goes from device to device in it, as in a pipeline."""
    found = reported("two_devices", options={"chunk_size": 48}, kind="recurrent", length=128)
    assert not found["stopped"] and not found["reasons"] and found["graphs"] == 1 and found["streamed"] == 1
    devices = dict(found["devices"])
    assert devices == {
        "layers_forward": ["cuda:0", "cuda:1"],
        "head_forward": ["cuda:1"],
        "layers_backward": ["cuda:0", "cuda:1"],
    }


@pytest.mark.long
def test_chunks_at_real_sizes() -> None:
    """A GPU is given enough to do: of all bytes that are moved beside products, few are moved for the sake of chunks."""
    found = reported(model="Qwen3-8B", layers=36)
    rows = {loop["name"]: loop["rows"] for loop in found["loops"]}
    assert all(2048 <= number <= 8192 for number in rows.values()), rows
    whole = reported(model="Qwen3-8B", layers=36, options={"chunk_size": 8192, "loss_chunk_size": 8192})
    assert found["moved"] <= 1.1 * whole["moved"]
    assert found["flops"] <= 1.01 * whole["flops"]


PLANNED = {"Gemma-3-1B": "a100", "Qwen3-4B": "a100", "GPT-OSS-20B": "h100"}


@pytest.mark.long
@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_is_that_of_a_trace_for_the_device(name: str) -> None:
    """It is traced on fake tensors of the CPU, and priced for another device."""
    asked: dict[str, Any] = {"model": name, "length": 4096, "device": PLANNED[name]}
    planned, traced = reported("planned", **asked), reported(**asked)
    assert planned["rows"] == [loop["rows"] for loop in traced["loops"] if loop["name"].endswith("_forward")]
    assert planned["peak"] == pytest.approx(traced["peak"], rel=1e-4)
    assert planned["flops"] == traced["flops"]
    for count in ("moved", "launches"):  # transformers makes a mask on some devices, which no loop needs
        assert planned[count] == pytest.approx(traced[count], rel=0.05)
