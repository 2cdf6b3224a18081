"""Facts about a graph: which axis is the sequence, which rows an operator reads, which keys a row sees. Nothing is rewritten."""
