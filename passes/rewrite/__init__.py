"""Graph to graph, in the fewest operators: each file is one thing that is said in many ways, and the one that passes read."""
