"""Why ranks do not run a graph: what `RanksDifferError` says in each case."""

from __future__ import annotations

from streamfx.errors import RanksDifferError, StreamFXError, told

NUMBER = " number "  # between the name of a collective of the traced graph and which of those it is
NOTHING_MORE = "nothing more"  # in the place of a line that a rank does not have
UNTIL_THEN = "please report this; until it is mended, run the model as it is, or with backend='aot_eager', on all ranks"

TWO_TOKENS = "each call sequences of two tokens at least, and as many as others (drop_last=True of a DataLoader)"
ALIKE = ("chunk_size", "loss_chunk_size", "save", "keep_every", "reshard")
SAME_OPTIONS = (
    f"give all ranks the same options ({', '.join(ALIKE)}, and a memory_budget only if it is the same), and {TWO_TOKENS}"
)
READ_BY_ALL = (
    "where ranks run code of their own, let the loss of each depend on all that is exchanged (with 0 times what it does not "
    "need): else it has no part in the backward half of that, and others wait for it, in eager as well"
)
OF_DATA = (
    "where ranks run code of their own, make what they exchange of data on all of them: what is made of a weight alone is "
    "gathered where weights are"
)


def failed_here(error: BaseException) -> RanksDifferError:
    """The analysis of a graph has failed with an error."""
    return RanksDifferError(
        "all ranks have to run the same collectives, and this rank could not analyse a graph that has some",
        found=told(error),
        do=UNTIL_THEN,
    )


def failure(error: BaseException) -> str:
    """What a rank that does not run a graph tells the others: what it found, and in lines of its own what to do."""
    if not isinstance(error, StreamFXError):
        return f"{told(error)}\n{UNTIL_THEN}"
    refused = ", ".join(filter(None, (error.asked, error.found, error.where))).replace("\n", " ")
    return f"{type(error).__name__}: {refused}\n{error.do}"


def failed_elsewhere(failure: str) -> RanksDifferError:
    """Another rank does not run a graph: its analysis has failed with an error, or what its user asked for is refused."""
    found, do = failure.split("\n", 1)
    return RanksDifferError("all ranks have to run the same collectives, and another rank does not run this graph", found, do=do)


def other_collectives(rank: int, first: str, other: str) -> RanksDifferError:
    """Ranks would run other collectives, or the same in another order."""
    return RanksDifferError(
        "all ranks have to run the same collectives in the same order",
        found=f"{first} on the first rank of a group, {other} on its rank {rank}",
        do=_what_makes_alike(first, other),
    )


def _what_makes_alike(first: str, other: str) -> str:
    """What helps where ranks differ in a line: in their code, or in what they were asked for."""
    if NOTHING_MORE in (first, other):
        return f"{READ_BY_ALL}; {SAME_OPTIONS}"
    if (NUMBER in first) != (NUMBER in other):
        return f"{OF_DATA}; {SAME_OPTIONS}"
    return SAME_OPTIONS


def other_order_than_before(before: str) -> RanksDifferError:
    """This rank would run the same collectives in another order than all ranks have agreed on."""
    return RanksDifferError(
        "the collectives of a model have one order, whatever the lengths, so that ranks may have lengths of their own",
        found=f"another order for the lengths of this call than for those before, which began with {before.splitlines()[0]}",
        do=f"give {TWO_TOKENS}",
    )


def nothing_from_others(error: BaseException) -> RanksDifferError:
    """Other ranks have not said what they run."""
    return RanksDifferError(
        "ranks that reduce rows have to compile the same graphs in the same order, so that they can compare them",
        found=str(error),
        do="see that all ranks call the model with inputs of the same sizes, and with the same code around it",
    )
