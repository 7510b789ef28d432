"""What this machine has: nodes, limits, tiers, and their speeds, measured or read from a file."""
