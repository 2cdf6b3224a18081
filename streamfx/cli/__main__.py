"""`python -m streamfx.cli` is `streamfx`."""

import sys

from streamfx.cli import main

sys.exit(main())
