"""Benchmarks: what a training step takes in time, memory and operations, with the alternatives beside it.

python -m benchmarks --quick                                             # the short form of all
python -m benchmarks                                                     # all; hours on two cores
python -m benchmarks step masks --length 8192 --rounds 3                 # some of them, as asked for
python -m benchmarks step --way checkpointing streambp --chunk-size 256 1024
python -m benchmarks step --json figures.json --chart figures.svg        # figures and a chart of them
python -m benchmarks --figures figures.json more.json --chart all.svg    # figures of earlier runs

python -m benchmarks.gpu kernels                                         # on one GPU: what no CPU can show
python -m benchmarks.gpu steps                                           # steps of Qwen3-8B

On a GPU: layers of real models or all of them, in bfloat16, with random weights.

python -m benchmarks step --model Qwen3-8B --layers 4 --length 24576 --way checkpointing streambp
python -m benchmarks longest --model Qwen3-8B --cap 60000
"""
