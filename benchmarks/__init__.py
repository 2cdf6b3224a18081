"""Benchmarks: what a training step takes in time, memory and operations, with the alternatives beside it.

python -m benchmarks                  # all of them, about half an hour on two cores
python -m benchmarks --quick          # the short form, two minutes
python -m benchmarks step growth      # some of them
"""
