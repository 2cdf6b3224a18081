"""Error messages for ranks that cannot run a graph: one `RanksDifferError` per cause."""

from __future__ import annotations

from streamfx.errors import RanksDifferError, StreamFXError, describe_error

NUMBER = " number "  # between the name of a collective of the traced graph and its index among collectives of this name
NOTHING_MORE = "nothing more"  # in place of a line that a rank does not have
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
    """Return the error of this rank after its analysis of a graph failed."""
    return RanksDifferError(
        "all ranks have to run the same collectives, and this rank could not analyse a graph that has some",
        found=describe_error(error),
        do=UNTIL_THEN,
    )


def failure(error: BaseException) -> str:
    """Return the text that a failed rank writes for the others: the cause in the first line, the remedy in the next."""
    if not isinstance(error, StreamFXError):
        return f"{describe_error(error)}\n{UNTIL_THEN}"
    cause = ", ".join(filter(None, (error.asked, error.found, error.where))).replace("\n", " ")
    return f"{type(error).__name__}: {cause}\n{error.do}"


def failed_elsewhere(failure: str) -> RanksDifferError:
    """Return the error of this rank after another rank failed or refused to run the graph."""
    found, do = failure.split("\n", 1)
    return RanksDifferError("all ranks have to run the same collectives, and another rank does not run this graph", found, do=do)


def other_collectives(rank: int, first_line: str, other_line: str) -> RanksDifferError:
    """Return the error for ranks that would run other collectives, or the same in another order."""
    return RanksDifferError(
        "all ranks have to run the same collectives in the same order",
        found=f"{first_line} on the first rank of a group, {other_line} on its rank {rank}",
        do=_remedy(first_line, other_line),
    )


def _remedy(first_line: str, other_line: str) -> str:
    """Return the remedy for a line in which ranks differ: in their code, or in their options."""
    if NOTHING_MORE in (first_line, other_line):
        return f"{READ_BY_ALL}; {SAME_OPTIONS}"
    if (NUMBER in first_line) != (NUMBER in other_line):
        return f"{OF_DATA}; {SAME_OPTIONS}"
    return SAME_OPTIONS


def other_order_than_before(agreed: str) -> RanksDifferError:
    """Return the error for a rank that would run the same collectives in another order than agreed."""
    return RanksDifferError(
        "the collectives of a model have one order, whatever the lengths, so that ranks may have lengths of their own",
        found=f"another order for the lengths of this call than for those before, which began with {agreed.splitlines()[0]}",
        do=f"give {TWO_TOKENS}",
    )


def nothing_from_others(error: BaseException) -> RanksDifferError:
    """Return the error for ranks that have not reported which collectives they run."""
    return RanksDifferError(
        "ranks that reduce rows have to compile the same graphs in the same order, so that they can compare them",
        found=str(error),
        do="see that all ranks call the model with inputs of the same sizes, and with the same code around it",
    )
