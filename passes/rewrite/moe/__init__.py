"""Rewrites of mixtures of experts: sorts by expert are removed, and masked writes become look-ups by a cumulative sum.

They know permutations, grouped matrix products, and the operator rules that say which dimensions an operator treats
alike. They replace a value only if its unpermuted value is proven equal.
"""
