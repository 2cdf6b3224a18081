"""Error messages for ranks that cannot run a graph: one `RanksDifferError` per cause.

Ranks (processes of distributed training) compare the collectives of their graphs, one per line of text, before they run them. If
these differ, or a rank fails to compile its graph, all ranks raise an error; otherwise they would wait for each other forever.
"""

from __future__ import annotations

from streamfx.errors import RanksDifferError, StreamFXError, describe_error

NUMBER = " number "  # between the name of a collective of the traced graph and its index among collectives of this name
NOTHING_MORE = "nothing more"  # in place of a line that a rank does not have
REPORT = "please report this; until it is fixed, run all ranks in eager mode, or with backend='aot_eager'"

TWO_TOKENS = "each call at least two tokens, and as many sequences as other calls (drop_last=True of a DataLoader)"
SHARED_OPTIONS = ("chunk_size", "loss_chunk_size", "save", "keep_every", "reshard")
SAME_OPTIONS = f"give all ranks the same options ({', '.join(SHARED_OPTIONS)}, and memory_budget), and {TWO_TOKENS}"
USE_ALL_RESULTS = (
    "if ranks run different code, let the loss of each rank depend on every exchanged tensor (add 0 times the unused ones): "
    "otherwise the rank skips the backward pass of that exchange, and other ranks wait for it, in eager mode too"
)
DEPEND_ON_DATA = (
    "if ranks run different code, let exchanged tensors depend on data on all ranks: a tensor that depends on weights alone is "
    "exchanged together with the weights"
)


def failed_here(error: BaseException) -> RanksDifferError:
    """Return the error to raise on this rank after its analysis of a graph with collectives failed with `error`."""
    return RanksDifferError(
        "all ranks have to run the same collectives, and this rank could not analyze a graph with collectives",
        found=describe_error(error),
        do=REPORT,
    )


def failure(error: BaseException) -> str:
    """Return the text by which a failed rank informs the others: the cause in the first line, the remedy in the next."""
    if not isinstance(error, StreamFXError):
        return f"{describe_error(error)}\n{REPORT}"
    cause = ", ".join(filter(None, (error.asked, error.found, error.where))).replace("\n", " ")
    return f"{type(error).__name__}: {cause}\n{error.do}"


def failed_elsewhere(failure: str) -> RanksDifferError:
    """Return the error to raise on this rank after another failed, or refused the graph; `failure` is the text of that rank."""
    found, do = failure.split("\n", 1)
    return RanksDifferError("all ranks have to run the same collectives, and another rank does not run this graph", found, do=do)


def other_collectives(rank: int, first_line: str, other_line: str) -> RanksDifferError:
    """Return the error for ranks that would run different collectives, or the same ones in another order.

    `first_line` and `other_line` are the first lines that differ: on the first rank of a group, and on its rank `rank`.
    """
    return RanksDifferError(
        "all ranks have to run the same collectives in the same order",
        found=f"{first_line} on the first rank of a group, {other_line} on its rank {rank}",
        do=_remedy(first_line, other_line),
    )


def _remedy(first_line: str, other_line: str) -> str:
    """Return the remedy for the first line in which the collectives of two ranks differ.

    The line of one rank may be missing (an exchange without use), or be a collective of the traced graph (it has a number) where
    the other has one that the passes wrote. Otherwise the options of the ranks differ.
    """
    if NOTHING_MORE in (first_line, other_line):
        return f"{USE_ALL_RESULTS}; {SAME_OPTIONS}"
    if (NUMBER in first_line) != (NUMBER in other_line):
        return f"{DEPEND_ON_DATA}; {SAME_OPTIONS}"
    return SAME_OPTIONS


def order_differs_between_lengths(agreed_lines: str) -> RanksDifferError:
    """Return the error for a rank whose collectives have another order in this call than in an earlier call.

    `agreed_lines`: the collectives of the earlier call, one per line; the message quotes the first.
    """
    first_line = agreed_lines.splitlines()[0]
    return RanksDifferError(
        "the collectives of a model must have the same order for all lengths, because lengths may differ between ranks",
        found=f"a different order for the lengths of this call than for earlier ones, which began with {first_line}",
        do=f"give {TWO_TOKENS}",
    )


def nothing_from_others(error: BaseException) -> RanksDifferError:
    """Return the error for ranks that have not reported which collectives they run; `error` is the failed exchange."""
    return RanksDifferError(
        "ranks that reduce over rows have to compile the same graphs in the same order, because they compare them",
        found=str(error),
        do="call the model on all ranks with inputs of the same sizes, and from the same code",
    )
