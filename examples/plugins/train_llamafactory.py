"""LLaMA-Factory's training, through streamfx: `llamafactory-cli train` takes no callbacks, `run_exp` behind it does.

    python examples/plugins/train_llamafactory.py sft.yaml
    torchrun --nproc-per-node 8 examples/plugins/train_llamafactory.py sft.yaml learning_rate=1e-5

Everything after the script's name is LLaMA-Factory's. Options of the backend come from the environment:
`STREAMFX_OPTIONS='{"chunk_size": 1024}'`.
"""

from __future__ import annotations

from llamafactory.train.tuner import run_exp

from streamfx.integrations import StreamCallback


def main() -> None:
    """Train as the command line says."""
    run_exp(callbacks=[StreamCallback()])


if __name__ == "__main__":
    main()
