"""Show the product of each pass: `TORCH_LOGS="+streamfx"` writes it to the log, `TORCH_TRACE` keeps it for tlparse."""

from __future__ import annotations

import logging
from typing import Any

from streamfx.ir.facts import Facts
from streamfx.log import log
from streamfx.tools.report.printer import text_of
from streamfx.torch_private import trace_artifact


def show_product(applied_pass: Any, facts: Facts) -> None:
    """Log and trace the product of a pass; the pipeline calls this after each pass."""
    if log.isEnabledFor(logging.DEBUG):
        log.debug("after %s:\n%s", applied_pass.name, _text(applied_pass.name, facts))
    trace_artifact(f"streamfx_{applied_pass.name}", lambda: _text(applied_pass.name, facts))


def _text(product: str, facts: Facts) -> str:
    """Return the text of a product. A printing error must not abort compilation."""
    try:
        return text_of(facts, product)
    except Exception as error:
        return f"({product} could not be printed: {type(error).__name__}: {error})\n"
