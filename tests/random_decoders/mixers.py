"""Mixers along the sequence, features and groups of experts, as expressions of mixers.txt."""

from tests.random_decoders.tables import expressions, tables

_TEXT = tables("mixers.txt")
ASSOCIATIVE, STATEFUL, DECAYS, VARIANTS = (
    _TEXT[name] for name in ("associative scans", "stateful operators", "decays", "variants")
)
UNCHUNKED, SCANS, MIXES, COUNTS, KEYS = (
    expressions(_TEXT[name]) for name in ("unchunked", "scans", "mixes", "counts", "keys of experts")
)
FEATURES = {  # the share of the width that an input has, and an expression of it before the first layer
    name: (parts, line) for parts, size in ((2, "half"), (1, "full")) for name, (line,) in _TEXT[f"{size} features"].items()
}
BYTES = {"as int8": ("group.to(torch.int8)", 128), "as uint8": ("group.to(torch.uint8)", 256)}  # and as many experts
