"""Terms of rows that read tables, are sorted, are worked on block by block, or see blocks."""

from __future__ import annotations

from tests.random_decoders.buffers import BUFFERS
from tests.random_decoders.compressed import COMPRESSED
from tests.random_decoders.cut_out import CUT_OUT
from tests.random_decoders.known_early import KNOWN_EARLY
from tests.random_decoders.loops import LOOPS
from tests.random_decoders.orders import ORDERS
from tests.random_decoders.squares import SQUARES
from tests.random_decoders.tables import TABLES

OF_ROWS = {**TABLES, **ORDERS, **LOOPS, **BUFFERS, **SQUARES, **COMPRESSED, **CUT_OUT, **KNOWN_EARLY}
