"""Names of plannable models and options, and the lookup of configuration files; without torch, so that help and errors
are fast.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from streamfx.errors import PlanError
from streamfx.tools.report.paths import is_file, is_there

FOLDER = Path(__file__).parent / "configurations"
FILE = "config.json"
VARIANT = re.compile(r"^meta-|-(instruct|base|it|pt)$")  # parts of names that do not change the sizes
TYPES = ("float32", "bfloat16", "float16")
GROUP = 8  # default number of answers per prompt in grpo
OBJECTIVES = ("sft", "dpo", "grpo")
OPTIMIZERS = ("none", "sgd", "adamw", "adamw_master", "adamw8bit")
SCHEMES = ("nf4", "int8", "fp8")
SHARDS = ("ddp", "zero1", "zero2", "zero3")
BACKEND_OPTIONS = ("chunk_size", "loss_chunk_size", "save", "keep_every", "offload")  # those of the command line
PLAN_ARGUMENTS = (
    *("seq", "batch", "memory", "host_memory", "dtype", "lora_rank", "quantize", "optimizer", "optimizer_in_backward", "offload"),
    *("world", "shard", "tensor", "context", "max_length", "max_batch", "frontier", "objective", "group", "device"),
)
TOKEN_COUNTS = ("seq", "chunk_size", "loss_chunk_size")
DEVICES = ("A100", "H100", "H200", "B200", "L40S", "RTX4090", "MI300X")


def builtin_names() -> list[str]:
    """Return the names of the built-in configurations."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def config_file(source: str | Path) -> Path:
    """Find the file of a Hugging Face configuration: in a folder, by its path, in the local cache, or built in.

    An `org/name` is searched in the cache first, then its last part among the built-in names, in any case and without a suffix
    such as `-Instruct` or `-it`. Nothing is downloaded.
    """
    path = Path(source)
    for candidate in (path / FILE, path):
        if is_file(candidate):
            return candidate
    if is_there(path) and path.is_dir():
        raise PlanError(
            f"the folder {str(source)!r} has no {FILE}", do="give the folder of a Hugging Face model, or a configuration"
        )
    cached = _in_cache(str(source))
    if cached is not None:
        return cached
    names = {name.lower(): name for name in builtin_names()}
    name = names.get(_plain_name(str(source)))
    if name is None:
        raise _unknown_name_error(str(source))
    return FOLDER / f"{name}.json"


def _plain_name(source: str) -> str:
    """Return the name of a model in lower case, without its organization and the parts that do not change its sizes.

    >>> _plain_name("Some-8B"), _plain_name("org/Meta-Some-8B-Instruct"), _plain_name("a/b/Some-8B")
    ('some-8b', 'some-8b', 'a/b/some-8b')
    """
    name = source.lower()
    return VARIANT.sub("", name.partition("/")[2] if name.count("/") == 1 else name)


def _in_cache(name: str) -> Path | None:
    """Return the configuration of `org/name` in the local cache, if it was downloaded before."""
    if name.count("/") != 1:
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        path = try_to_load_from_cache(name, FILE)
    except HFValidationError:  # not a valid repository name
        return None
    return Path(path) if isinstance(path, str) else None


def _may_be_of_hub(source: str) -> bool:
    """Return whether the source may be an `org/name`. A path that starts with a dot, or whose parent folder exists, is not."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source) is not None and not is_there(Path(source).parent)


def _unknown_name_error(source: str) -> PlanError:
    """Return the error for an unknown configuration, with a similar name if there is one."""
    names = builtin_names()
    names_by_lower = {name.lower(): name for name in names}
    similar = difflib.get_close_matches(_plain_name(source).rpartition("/")[2], names_by_lower, n=1, cutoff=0.6)
    hint = f"did you mean {names_by_lower[similar[0]]!r}? " if similar else ""
    download = f"`hf download {source} {FILE}` stores it in the cache, or " if _may_be_of_hub(source) else ""
    return PlanError(
        f"there is no configuration {source!r}",
        found=f"neither a folder with a {FILE}, nor a JSON file, nor an org/name in the local cache, nor a shipped name",
        do=f"{hint}{download}give a path, or one of {', '.join(names)}",
    )
