"""One run: built from inventory and decision, and torn down; its checkpoints and its report."""
