"""The optimizer's step of a run: adopted optimizers, unit after unit."""
