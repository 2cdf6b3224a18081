"""Operators with a state that run on a CPU, declared to streamfx: each has something that real kernels have."""
