"""Faults that the tests have to see: each is put back into a copy of the code by hand, and a default test has to fail.

    python -m tests.mutations                    all rows, some seconds each; exit status 1 if one is not caught
    python -m tests.mutations 3 "sinks" --log f  those of some kinds, and what pytest said of rows that were not caught

The rows are in `rows/`; `row.py` says how they are written. A row whose place has changed is mended in the commit that changes it
(`tests/test_mutations.py` asks for it). Whoever finds a fault that no test saw adds the test, and the mended line as a row.
"""

from __future__ import annotations

from tests.mutations.row import Mutation

# Numbers are those of the list of faults that the kinds were first found in; those with names were found since.
KINDS = {
    "1": "an argument of an operator that a rule does not look at",
    "2": "arithmetic that wraps or rounds",
    "3": "values that count as ordinary scores and are not",
    "4": "two passes that have to agree bit by bit",
    "5": "state that calls share",
    "6": "changes that no version counter shows",
    "7": "the contract of a kernel",
    "8": "linear maps that are not",
    "9": "casts that change numbers",
    "10": "a softmax with a sink",
    "11": "operands taken for what they usually are",
    "12": "a plan that holds for the first length only",
    "13": "settings that leak",
    "14": "buffers that are read and then written",
    "sinks": "attention beside a sink by a fused kernel",
    "rows": "an index that is not the number of a row",
    "scans": "a loop over rows that is one operator, taken for another",
    "shifts": "scores by distance, shifted row by row: what is no such shift, or takes the next row's",
    "joins": "parts that are joined to one sequence, of which a chunk joins its own rows",
    "orders": "rows that are sorted and put back, each into a place of its own, or not",
    "blocks": "blocks that are cut out of rows, and what is added to them",
    "compressed": "keys that stand for blocks of rows, collected, or joined with rows and seen by parts",
    "truncations": "gradients that reach back few rows, or not",
    "trees": "an associative scan that was traced as a tree, taken for another",
    "decays": "a product with weights that decay, taken for another",
    "states": "the state of an operator, handed on to another chunk, or not",
    "copies": "copies to the host and back: streams that do not wait, memory that is used too early or kept too long",
    "chunks": "operators whose copy for a chunk is more than the operator on fewer rows",
    "sums": "parts of sums in a type that is too narrow for them",
    "sizes": "numbers that follow from dynamic lengths",
    "views": "returned views, and memory that results share",
    "marks": "conjugates and negatives that are only marked",
    "segments": "stretches compiled for other sizes, strides or types",
    "keys": "values of positions that are made for too few keys",
    "shards": "what is known of a shard, taken for the whole",
    "ranks": "rows that are reduced over ranks, inside of loops",
    "buckets": "collectives that run as one and are not of one kind, or too late for who needs them",
    "stages": "gradients that are handed over while they, or their parameters, are still read",
    "again": "what runs whole and is made again: by what does not give the same, or not alike on all ranks",
    "wire": "what is counted of collectives",
    "told": "what a person is told that is not so, or is not told",
    "plans": "what few layers tell of all, and one length of others, where they do not",
    "splits": "a graph that is split in two where two are not what one is; heads that keep what they need not",
    "reports": "what is drawn of predictions, and how names stand in it",
}
ROWS: tuple[Mutation, ...] = tuple(Mutation.all())
