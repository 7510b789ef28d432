"""Parts of `examples/bench/adam.py`: the sections, and the optimizers of others that they compare with."""
