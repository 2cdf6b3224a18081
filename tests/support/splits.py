"""Split graphs in two at a chosen node, regardless of the gain."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from torch import fx

import streamfx.frontend.split_graphs
from streamfx.ir.facts import Facts
from streamfx.passes.partition.two_sequences import bytes_at_split_points
from tests.support.peaks import however_small


@contextmanager
def split_at(choose: Callable[[list[fx.Node]], fx.Node], times: int = 1) -> Iterator[list[str]]:
    """Split graphs of training steps in front of chosen nodes; gives the names of these."""
    chosen: list[str] = []

    def where(facts: Facts, graph: fx.Graph, peak: Callable[[], int]) -> fx.Node | None:
        nodes = list(graph.nodes)
        places = [nodes[place] for place in bytes_at_split_points(nodes)]
        if len(chosen) == times or not places:
            return None
        place = choose(places)
        chosen.append(place.name)
        return place

    with however_small(), mock.patch.multiple(streamfx.frontend.split_graphs, find_split=where, MIN_GAIN=0.0):
        yield chosen
