"""`python -m streamfx` is the command `streamfx`."""

import sys

from streamfx.tools.cli import command

if __name__ == "__main__":
    sys.exit(command())
