"""`python -m streamfx.cli` is `streamfx`."""

import sys

from streamfx.cli import command

sys.exit(command())
