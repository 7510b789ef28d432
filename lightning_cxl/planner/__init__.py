"""Reports before and after a run: machine, placement, measured bytes."""
