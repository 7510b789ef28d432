"""This machine: nodes, limits, tiers, their speeds (measured or read from a file), and the share of each process."""
