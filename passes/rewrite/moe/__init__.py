"""Rewrites of mixtures of experts: sorting rows by expert is removed, and rows written by a mask become an index of a
cumulative sum.

They know permutations, grouped matrix products, and the operator rules that say which dimensions an operator treats
alike. They replace a value only if its unpermuted value is proven equal.
"""
