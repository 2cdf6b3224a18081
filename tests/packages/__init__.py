"""Decoders of packages other than transformers: real code that nobody wrote with streamfx in mind."""
