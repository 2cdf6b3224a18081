"""A plugin of Axolotl: trains through streamfx what a configuration describes.

In the YAML file, with this folder on `PYTHONPATH`:

    plugins:
      - streamfx_axolotl.StreamPlugin
    streamfx:
      chunk_size: 1024

`streamfx:` holds the backend's options and may be left out. Leave `torch_compile` out, too.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from streamfx.integrations import StreamCallback


class StreamArgs(BaseModel):
    """What the plugin adds to Axolotl's configuration."""

    streamfx: dict[str, Any] | None = None


class StreamPlugin(BasePlugin):
    """Gives each trainer that Axolotl builds a callback that streams its model while it trains."""

    def get_input_args(self) -> str:
        """Where Axolotl finds `StreamArgs`."""
        return f"{StreamArgs.__module__}.{StreamArgs.__name__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[StreamCallback]:
        """The callbacks of a trainer to be built."""
        return [StreamCallback(options=dict(cfg.streamfx or {}))]
