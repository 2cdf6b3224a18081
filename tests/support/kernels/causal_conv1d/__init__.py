"""A stand-in for the causal-conv1d package: what it registers and exports (1.6), with plain arithmetic, on any device."""

from causal_conv1d.interface import causal_conv1d_fn

__version__ = "1.6.1"
__all__ = ["causal_conv1d_fn"]
