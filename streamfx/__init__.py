"""streamfx: a `torch.compile` backend that streams any decoder along its sequence."""

from streamfx.backend import streambp
from streamfx.errors import NotStreamed, OptionError, StaleGraph, StaleOutput, StreamFXError
from streamfx.options import Options, configure

__version__ = "0.1.0"

__all__ = [
    "NotStreamed",
    "OptionError",
    "Options",
    "StaleGraph",
    "StaleOutput",
    "StreamFXError",
    "configure",
    "streambp",
]
