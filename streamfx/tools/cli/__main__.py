"""`python -m streamfx.tools.cli` is `streamfx`."""

import sys

from streamfx.tools.cli import command

sys.exit(command())
