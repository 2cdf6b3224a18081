"""A plugin of ms-swift: a callback that streams the model while it trains.

    swift sft ... --external_plugins examples/plugins/streamfx_swift.py --callbacks streamfx

Options of the backend come from the environment: `STREAMFX_OPTIONS='{"chunk_size": 1024}'`.
"""

from __future__ import annotations

from swift.callbacks import callbacks_map

from streamfx.integrations import StreamCallback

callbacks_map["streamfx"] = lambda args, trainer: StreamCallback()
