"""`streamfx plan`: what a training step of a real-size model takes, before anything runs."""
