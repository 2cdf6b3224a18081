"""The logger for `TORCH_LOGS="streamfx"` and `TORCH_LOGS="+streamfx"`."""

from __future__ import annotations

import logging

from streamfx.torch_private import register_logger

log = logging.getLogger("streamfx")
register_logger("streamfx")
