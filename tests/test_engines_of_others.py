"""Engines of others: FSDP1, DeepSpeed, accelerate, Lightning Fabric, on two ranks by gloo."""

import copy
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy  # noqa: F401  (in tests/tables)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.support.collectives import data_of, one_process, worst
from tests.support.engines import LENGTH, TOLERANCE, enabled, graphs_seen, twins, wrapped
from tests.support.ranks import on_ranks
from tests.support.sharded import Layer
from tests.support.tables import named_cases
from tests.support.trainers import tiny

pytestmark = pytest.mark.long


def launched(rank: int) -> None:
    """Set the environment of a launcher; the process group exists already, so no port is opened."""
    own = f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 NODE_RANK=0 MASTER_ADDR=127.0.0.1 "
    own += "MASTER_PORT=0 TORCHELASTIC_RUN_ID=1 HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 DS_ACCELERATOR=cpu"
    os.environ.update({name: value for name, _, value in (item.partition("=") for item in own.split())})


# -- FSDP1


def fsdp1(rank: int, own_parameters: bool, before: bool, **options: Any) -> None:
    """Compare with the same engine in eager, whose shards have the same layout."""
    model, eager = twins()
    done = enabled(model) if before else None
    by_layer: dict[str, Any] = {"auto_wrap_policy": ModuleWrapPolicy({Layer}), "device_id": torch.device("cpu")}
    wrap: Any = partial(FullyShardedDataParallel, use_orig_params=own_parameters, **by_layer, **options)
    wrapper, other = wrap(model), wrap(eager)
    done = done or enabled(wrapper)
    for _ in range(2):
        for each in (wrapper, other):
            each.zero_grad()
            (each(*data_of(rank, LENGTH)) * (rank + 1)).backward()
        pairs = [
            (own.grad, true.grad) for own, true in zip(wrapper.parameters(), other.parameters(), strict=True) if true.numel()
        ]
        assert pairs and all(float((own - true).abs().max()) < TOLERANCE for own, true in pairs if true is not None)
    assert "FSDP1" in str(done) and "model.body.layers.0 and 1 like it (Layer): a wrapped module" in str(done)
    assert all(calls.counts.compiled or "head" in name for name, calls in done.calls.items())


# -- DeepSpeed


def deepspeed(rank: int, stage: int, before: bool) -> None:
    """Weights after two steps, against eager of the same engine (which reduces in float32)."""
    import deepspeed as library

    launched(rank)
    library.init_distributed("gloo")
    model, eager = twins()
    done = enabled(model) if before else None
    engines = []
    for own in (model, eager):
        settings: dict[str, Any] = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}
        settings |= {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
        optimizer = torch.optim.SGD(own.parameters(), lr=1.0)
        engines.append(library.initialize(model=own, optimizer=optimizer, config=settings)[0])
    done = done or enabled(engines[0])
    for _ in range(2):
        for engine in engines:
            engine.backward(engine(*data_of(rank, LENGTH)) * (rank + 1))
            engine.step()
    for mine, true in zip(model.parameters(), eager.parameters(), strict=True):
        assert float((mine - true).abs().max()) < 1e-6
    assert done.calls["model"].counts.compiled == 2 and (before or "DeepSpeedEngine" in str(done))


# -- accelerate, Fabric


def batch(rank: int) -> dict[str, Tensor]:
    ids = torch.randint(8, 60, (2, 40), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids}


def accelerated(rank: int, before: bool) -> None:
    """`Accelerator.prepare`, which enables FSDP on GPUs only: its state is patched."""
    launched(rank)
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    torch.set_default_dtype(torch.float64)
    accelerator = Accelerator(cpu=True)
    by_layer: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap"}
    by_layer["transformer_cls_names_to_wrap"] = ["LlamaDecoderLayer"]
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, **by_layer)
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    model = tiny.causal_model()
    truth = copy.deepcopy(model)
    done = enabled(model) if before else None
    with graphs_seen() as graphs:
        given, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        done = done or enabled(given)
        for _ in range(2):
            given.zero_grad()
            truth.zero_grad()
            torch.stack([truth(**batch(other)).loss for other in range(2)]).mean().backward()
            accelerator.backward(given(**batch(rank)).loss)
            assert worst(model, truth) < TOLERANCE
        compiled = [calls.counts.compiled for calls in done.calls.values()]
        with torch.no_grad():  # generation runs as it was, the parts of a model as well
            given(input_ids=batch(0)["input_ids"][:, :5], use_cache=True)
        assert compiled == [calls.counts.compiled for calls in done.calls.values()]
        assert all(calls.counts.plain for calls in done.calls.values())
    with_attention = [graph for graph in graphs if "scaled_dot_product_attention" in graph]
    assert len(with_attention) == 1 and "FSDP2" in str(done)


def fabric(rank: int, before: bool) -> None:
    launched(rank)
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    def shard(model: Any, mesh: Any) -> Any:
        return wrapped(model, mesh["data_parallel"])

    strategy: Any = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    own = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    own.launch()
    model, truth = twins()
    done = enabled(model) if before else None
    given = own.setup_module(model)
    done = done or enabled(given)
    for _ in range(2):
        one_process(truth, LENGTH)
        model.zero_grad()
        own.backward(given(*data_of(rank, LENGTH)) * (rank + 1))
        assert worst(model, truth) < TOLERANCE
    assert "FSDP2" in str(done)


CASES: dict[str, tuple[str, Callable[[int], None]]] = named_cases("engines", globals())


@pytest.mark.parametrize("name", CASES)
def test_engines(name: str) -> None:
    library, case = CASES[name]
    pytest.importorskip(library)
    on_ranks(case)
