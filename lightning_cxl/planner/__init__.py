"""Before and after a run: machines, jobs, predicted seconds, placement, measured bytes."""
