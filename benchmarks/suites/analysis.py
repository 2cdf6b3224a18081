"""What the passes take of a compilation."""

from __future__ import annotations

from benchmarks.processes import Measured
from benchmarks.settings import Rows, Settings

NARROW = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}


def analysis(settings: Settings) -> Rows:
    """The passes against AOTAutograd's own tracing of the same graph, by the number of layers; processor seconds."""
    options = {"chunk_size": 64, "loss_chunk_size": 64}
    rows: Rows = []
    for layers in (2, 8) if settings.quick else (2, 4, 8, 16, 32, 64):
        settings.tell(f"{layers} layers")
        sizes = {**NARROW, "num_hidden_layers": layers}
        with Measured("streambp, eager bodies", 256, sizes=sizes, options=options) as process:
            found = process.ask("analysis")
        rows.append(
            {
                "layers": layers,
                "operators": found["nodes"],
                "tracing s": found["tracing"],
                "passes s": found["passes"],
                "of tracing": found["passes"] / found["tracing"],
                "passes ms / operator": 1000 * found["passes"] / found["nodes"],
            }
        )
    return rows
