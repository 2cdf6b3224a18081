"""Private interfaces of Inductor's cache on disk, through which another process compiles for this one.

Two processes share an entry of the cache if they compile the same graph with the same settings. "(2.11, 2.13)": the torch
versions on which it was tested.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils import deterministic as _deterministic

from streamfx.torch_private.inductor import wrap_inductor_errors

deterministic: Any = _deterministic  # a module of properties, which type checkers do not know
# Passes of the user, which are functions: no other process has them (2.11, 2.13).
CUSTOM_PASSES = (
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "pre_grad_custom_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
)
# A part of the cache's key, also on a CPU (2.11, 2.13).
MATMUL_SETTINGS = ("fp32_precision", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


def cache_folder() -> str:
    """Return the folder of Inductor's cache, which it creates if necessary (2.11, 2.13)."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def portable_settings() -> bytes | None:
    """Return all settings on which compiled code depends, for another process; None if they cannot be sent (2.11, 2.13).

    They cannot be sent if Inductor keeps no cache on disk, or if the user's own passes change its graphs.
    """
    with wrap_inductor_errors():
        from torch._functorch import config as functorch_config
        from torch._inductor import config as inductor_config

        is_cached = inductor_config.fx_graph_cache and not inductor_config.force_disable_caches
        if not is_cached or any(getattr(inductor_config, name, None) is not None for name in CUSTOM_PASSES):
            return None
        settings = {
            "inductor": inductor_config.save_config_portable(),
            "functorch": functorch_config.save_config_portable(),
            "threads": torch.get_num_threads(),
            "dtype": torch.get_default_dtype(),
            "matmul": {name: getattr(torch.backends.cuda.matmul, name) for name in MATMUL_SETTINGS},
            "fill": deterministic.fill_uninitialized_memory,
            "torch": torch.__version__,
        }
        try:
            return pickle.dumps(settings)
        except (pickle.PicklingError, AttributeError, TypeError):
            return None


@contextmanager
def use_settings(saved: bytes) -> Iterator[None]:
    """Context manager: compile with the settings that another process sent (`portable_settings`) (2.11, 2.13)."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    settings: dict[str, Any] = pickle.loads(saved)
    torch.set_num_threads(settings["threads"])
    torch.set_default_dtype(settings["dtype"])
    for name, value in settings["matmul"].items():
        if getattr(torch.backends.cuda.matmul, name) != value:  # setting the default changes the cache's key
            setattr(torch.backends.cuda.matmul, name, value)
    deterministic.fill_uninitialized_memory = settings["fill"]
    with ExitStack() as stack:
        for config, name in ((inductor_config, "inductor"), (functorch_config, "functorch")):
            known = {key: value for key, value in settings[name].items() if hasattr(config, key)}
            stack.enter_context(config.patch(known))
        yield


def environment_of_compiler() -> dict[str, str]:
    """Return the environment variables of a process that compiles into this process's cache with one thread (2.11, 2.13)."""
    return {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache_folder(), "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCH_WARM_POOL": "0"}
