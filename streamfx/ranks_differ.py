"""Why ranks do not run a graph: what `RanksDiffer` says in each case."""

from __future__ import annotations

from streamfx.errors import RanksDiffer, told

UNTIL_THEN = "please report this; until it is mended, compile with backend='aot_eager' on all ranks"


def failed_here(error: BaseException) -> RanksDiffer:
    """The analysis of a graph has failed with an error."""
    return RanksDiffer(
        "all ranks have to run the same collectives, and this rank could not analyse a graph that has some",
        found=told(error),
        do=UNTIL_THEN,
    )


def failed_elsewhere(found: str) -> RanksDiffer:
    """Another rank's analysis has failed with an error."""
    return RanksDiffer(
        "all ranks have to run the same collectives, and another rank could not analyse this graph", found, do=UNTIL_THEN
    )


def other_collectives(rank: int, first: str, other: str) -> RanksDiffer:
    """Ranks would run other collectives, or the same in another order."""
    return RanksDiffer(
        "all ranks have to run the same collectives in the same order",
        found=f"{first} on the first rank of a group, {other} on its rank {rank}",
        do="give all ranks the same options: save, keep_every and reshard, and a memory_budget only if it is the same",
    )


def other_order_than_before(before: str) -> RanksDiffer:
    """This rank would run the same collectives in another order than all ranks have agreed on."""
    return RanksDiffer(
        "the collectives on weights have one order, whatever the lengths, so that ranks may have lengths of their own",
        found=f"another order for the lengths of this call than for those before, which began with {before.splitlines()[0]}",
        do="give each call sequences of two tokens at least, and all calls as many (drop_last=True of a DataLoader)",
    )


def nothing_from_others(error: BaseException) -> RanksDiffer:
    """Other ranks have not said what they run."""
    return RanksDiffer(
        "ranks that reduce rows have to compile the same graphs in the same order, so that they can compare them",
        found=str(error),
        do="see that all ranks call the model with inputs of the same sizes, and with the same code around it",
    )
