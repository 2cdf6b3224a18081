"""Random decoders, composed from ingredients, as programs: `python -m tests.random_decoders --count 5000`."""
