"""The zoo: every causal language model that transformers knows, tiny, eager against `backend="streambp"`.

python -m tests.zoo MODEL_TYPE ...   measure some and print what was found
python -m tests.zoo --all            measure all that have no row yet (--again: anew), each in a process of its own
python -m tests.zoo --report         write docs/coverage.md from the rows
"""
