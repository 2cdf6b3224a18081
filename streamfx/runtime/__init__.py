"""What runs: loops over chunks, their buffers, attention kernels and replayed randomness."""
