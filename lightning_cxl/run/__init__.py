"""One run: construction from a plan, teardown, checkpoints, and the report."""
