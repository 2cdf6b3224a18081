"""Loops over rows that tracing has unrolled, rolled up again into one operator each."""
