"""Deferred outputs: large results of a graph that are cheap to rebuild are made when they are touched, if ever."""

from streamfx.lazy.rewrite import Deferral, defer_outputs

__all__ = ["Deferral", "defer_outputs"]
