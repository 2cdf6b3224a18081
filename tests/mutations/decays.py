"""Products with weights that decay: which matrix is one, what stands in front of its rows, what a chunk is given and leaves."""

from __future__ import annotations

from tests.mutations.row import Mutation

READ, FIND = "passes/recurrences/decays.py", "passes/recurrences/block_products.py"
PROVEN, RUN = "passes/canonicalization/decayed_sums.py", "streamfx/runtime/decayed_sums.py"
OTHERS = "test_decayed_sums.py::test_what_only_looks_like_one"
STREAMS = "test_decayed_sums.py::test_blocks_hand_on_what_is_left"
OPERATOR = "test_decayed_sums.py::test_the_operator_is_the_product"


def fault(what: str, file: str, before: str, after: str, *tests: str) -> Mutation:
    return Mutation("decays", what, file, before, after, tests)


ROWS = (
    fault(
        "a diagonal may lie anywhere",
        READ,
        "_CUTS.get((known.kind, least,",
        "_CUTS.get((known.kind, int(known.kind is Kind.REPEATED),",
        f"{OTHERS}[a row more in each sum]",
        f"{OTHERS}[the row after is seen]",
    ),
    fault(
        "a triangle is that below the diagonal",
        READ,
        "triangle is None or triangle.inside:",
        "triangle is None:",
        f"{OTHERS}[below the diagonal nothing]",
    ),
    fault(
        "little is nothing",
        READ,
        "-inf if value <= NOTHING_LEFT else float(value)",
        "-inf if value < 0 else float(value)",
        f"{OTHERS}[above the diagonal little, and not nothing]",
    ),
    fault(
        "rows and columns may change places",
        READ,
        "len(self.dims) > 1 and self.dims[-2] == self.rows and self.dims[-1] == COLUMN",
        "len(self.dims) > 1",
        f"{OTHERS}[differences the other way round]",
    ),
    fault(
        "sums may run along anything",
        READ,
        "known.kind is Kind.STRICT and known.dims[dim] == known.rows",
        "known.kind is Kind.STRICT",
        f"{OTHERS}[sums over something else]",
    ),
    fault(
        "differences of any two sums",
        READ,
        "or (one.source, one.rows) != (other.source, other.rows)",
        "or one.rows != other.rows",
        f"{OTHERS}[sums of two]",
    ),
    fault(
        "what is written into is read as it was",
        FIND,
        "if any(node.meta[EXAMPLE]._version for node in",
        "if any(False for node in",
        f"{OTHERS}[weights that are written]",
    ),
    fault(
        "modes between are not looked at",
        FIND,
        "return all(node.meta.get(EXAMPLE) is not None for node in between)",
        "return True",
        f"{OTHERS}[weights without a gradient]",
    ),
    fault(
        "narrow types are summed as wide ones", FIND, " and node.meta[EXAMPLE].dtype in TYPES:", ":", f"{OTHERS}[a narrow type]"
    ),
    fault(
        "a product may lie in memory in any order",
        FIND,
        "if sizes[letter] != 1 and strides[letter] != dense:",
        "if False:",
        f"{OTHERS}[another order in memory]",
    ),
    fault(
        "bits are turned as truth is",
        READ,
        '(name == "invert" and node.meta[EXAMPLE].dtype == torch.bool)',
        'name == "invert"',
        f"{OTHERS}[a triangle of numbers whose bits are turned]",
    ),
    fault("any number in front is zero", FIND, "or apart[2] in (None, 0))", "or True)", f"{STREAMS}[behind a number]"),
    fault(
        "a decay that is in no weight has no gradient",
        FIND,
        "behind[0] is None or not behind[0].meta[EXAMPLE].requires_grad",
        "True",
        f"{STREAMS}[behind a decay]",
    ),
    fault(
        "weights may grow",
        PROVEN,
        '.of(call.arguments["decays"]).high > 0:',
        '.of(call.arguments["decays"]).high < 0:',
        "test_decayed_sums.py::test_what_may_grow_is_summed_in_one_piece",
    ),
    fault("chunks begin with nothing", RUN, "        sums += (", "        (", OPERATOR),
    fault(
        "what nothing is left of has a gradient",
        RUN,
        "weights[..., :1] = 0  #",
        "pass  #",
        "test_decayed_sums.py::test_the_first_decay_is_in_no_weight",
    ),
    fault("a decay is part of its own row's weight", RUN, ".flip(-2).tril(-1).sum(-1)", ".flip(-2).tril(0).sum(-1)", OPERATOR),
    fault("the last sum has no gradient", RUN, "drows += inner[..., -1:, :].mT * dlast", "pass", OPERATOR),
)
