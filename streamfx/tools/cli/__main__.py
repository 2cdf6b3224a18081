"""Run the command `streamfx` as `python -m streamfx.tools.cli`."""

import sys

from streamfx.tools.cli import command

sys.exit(command())
