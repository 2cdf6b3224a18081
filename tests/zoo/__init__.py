"""The zoo: every causal language model that transformers knows, tiny, eager against `backend="streambp"`.

python -m tests.zoo MODEL_TYPE ...   measure some and print their rows
python -m tests.zoo --all            measure all that have no row yet (--again: all), each in a separate process
python -m tests.zoo --report         write docs/coverage.md from the rows
"""
