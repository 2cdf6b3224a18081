"""What a program takes: FLOPs and live bytes, measured on fake tensors. The planner and the reports both read it."""
