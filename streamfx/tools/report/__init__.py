"""Seeing what the backend does: explain, verify, and the text of every pass."""
