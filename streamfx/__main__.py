"""Run the command `streamfx` as `python -m streamfx`."""

import sys

from streamfx.tools.cli import command

if __name__ == "__main__":
    sys.exit(command())
