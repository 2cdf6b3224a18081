"""Where the graph is cut, what is kept and what is computed again, and how large chunks are."""
