"""What the commands that measure share: timing, and results with their goals."""
