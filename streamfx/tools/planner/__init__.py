"""`streamfx plan`: predict the memory and time of a training step of a full-size model without running it.

The package knows Hugging Face configurations, devices, optimizers and parallelism, and searches for the longest length or largest
batch within a budget. It may import `tools.inspect` and every layer below, but not the integrations; only the command line may
import it. Models stay on the meta device: nothing is computed or downloaded.
"""
