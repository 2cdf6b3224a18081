"""Decoders of packages other than transformers: real code, written independently of streamfx."""
