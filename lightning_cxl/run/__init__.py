"""One run: construction from inventory and decision, teardown, checkpoints, and the report."""
