"""python -m tests.screens: the pictures of reports in docs/, by Chromium."""

import tempfile
from pathlib import Path

import streamfx
from streamfx.tools.report.html import comparison_html_of, html_of
from tests.support.browser import screenshot

DOCS = Path(__file__).parents[1] / "docs"
TOKENS = 16_384
MODEL = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "vocab_size": 32_000,
    "max_position_embeddings": TOKENS,
}


def main() -> None:
    plan, small = (streamfx.plan(MODEL, seq=TOKENS, loss_chunk_size=rows) for rows in (2048, 256))
    with tempfile.TemporaryDirectory() as folder:
        screenshot(html_of(plan.page), DOCS / "report.png", 800, 1010, Path(folder))
        screenshot(comparison_html_of(plan.page, small.page), DOCS / "comparison.png", 360, 1250, Path(folder), dark=True)


if __name__ == "__main__":
    main()
