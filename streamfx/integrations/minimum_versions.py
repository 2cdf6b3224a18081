"""Which versions of a library are too old for `enable`?

In an older one, what is relied on has another name or is not there, and nobody would notice: TRL's trainers before 1.15 call the
backbone past the model, so that a compiled model is never called. Only libraries that a given object comes from are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from typing import Any

from torch.torch_version import TorchVersion

from streamfx.errors import IntegrationError

LEAST = {  # the oldest with which the tests pass; pyproject.toml asks for the same
    "accelerate": "1.4",
    "lightning": "2.5",
    "peft": "0.19",
    "transformers": "5.0",
    "trl": "1.15",  # the first whose trainers call the model for its log-probabilities (`fused_lm_head`)
}


def check_versions(given: Iterable[Any]) -> None:
    """Raise if one of the objects comes from a library that is too old."""
    for name, object_of_it in sorted(_libraries_of(given).items()):
        found = _version(name)
        if is_too_old(name, found):
            raise IntegrationError(
                f"streamfx.enable relies on what {name} has since version {LEAST[name]}",
                found=f"{name} {found}, which {object_of_it} comes from",
                do=f"pip install '{name}>={LEAST[name]}'",
            )


def is_too_old(name: str, found: str | None) -> bool:
    """Whether a version of a library is one that `enable` refuses."""
    return found is not None and name in LEAST and TorchVersion(found) < LEAST[name]


def _libraries_of(given: Iterable[Any]) -> dict[str, str]:
    """Libraries of the table that classes of the objects, or their bases, were defined in; each with one of these classes."""
    kinds = {kind: None for item in given for kind in type(item).__mro__}
    return {name: kind.__name__ for kind in reversed(kinds) if (name := kind.__module__.partition(".")[0]) in LEAST}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # a checkout on the path: its owner knows
        return None
