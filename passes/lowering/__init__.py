"""The program that runs instead of the graph: its halves, its loops, their bodies and buffers."""
