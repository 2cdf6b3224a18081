"""Rewrites of losses: a mean over tokens becomes a sum and a count, which loops can accumulate chunk by chunk.

They know the reductions, class weights and ignored labels of `nll_loss`. They are local: they read and replace only a
loss or its gradient.
"""
