"""Known faults: each is inserted into a copy of the code, and a default test has to fail.

    python -m tests.mutations                    all rows, some seconds each; exit status 1 if one is not caught
    python -m tests.mutations 3 "sinks" --log f  rows of some kinds; pytest's output for rows that were not caught

The rows are in `rows/`, in the format of `row.py`; `kinds.txt` explains the kinds. A commit that changes the code of a row also
changes the row (`tests/test_mutations.py` checks this). If you fix a fault that no test caught, add a test and a row.
"""

from pathlib import Path

from tests.mutations.row import Mutation
from tests.support.tables import read

# A number is that of the list of faults in which a kind was first found; later kinds have names.
KINDS = dict(read(Path(__file__).parent / "kinds.txt", 2)[""])
ROWS: tuple[Mutation, ...] = tuple(Mutation.all())
