"""Refuse versions of libraries that are too old for `enable`.

In older versions a required attribute is missing or renamed, and the failure would be silent: TRL's trainers before
1.15 bypass the model and call the backbone, so a compiled model is never called. Only libraries that define the given
objects are checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from typing import Any

from torch.torch_version import TorchVersion

from streamfx.errors import IntegrationError

MIN_VERSIONS = {  # the oldest versions that pass the tests; pyproject.toml requires the same
    "accelerate": "1.4",
    "lightning": "2.5",
    "peft": "0.19",
    "transformers": "5.0",
    "trl": "1.15",  # the first version whose trainers call the model for log-probabilities (`fused_lm_head`)
}


def check_versions(objects: Iterable[Any]) -> None:
    """Raise `IntegrationError` if the class of one of the objects comes from a library version that is too old."""
    for name, class_name in sorted(_libraries_of(objects).items()):
        version = installed_version(name)
        if is_too_old(name, version):
            raise IntegrationError(
                f"streamfx.enable needs {name} {MIN_VERSIONS[name]} or later",
                found=f"{name} {version}, which defines {class_name}",
                do=f"pip install '{name}>={MIN_VERSIONS[name]}'",
            )


def is_too_old(name: str, version: str | None) -> bool:
    """Return whether `enable` refuses a version of a library; never an unknown version (None) or another library."""
    return version is not None and name in MIN_VERSIONS and TorchVersion(version) < MIN_VERSIONS[name]


def _libraries_of(objects: Iterable[Any]) -> dict[str, str]:
    """Return the libraries in `MIN_VERSIONS` that define a class (or base class) of the objects: library -> name of a class."""
    classes = {cls: None for item in objects for cls in type(item).__mro__}  # a dict, for its order
    return {name: cls.__name__ for cls in reversed(classes) if (name := cls.__module__.partition(".")[0]) in MIN_VERSIONS}


def installed_version(name: str) -> str | None:
    """Return the installed version of a library; None if it has no metadata."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # a source checkout without metadata: its version is not checked
        return None
