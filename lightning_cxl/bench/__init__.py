"""Benchmarks of the kernels on the machine at hand, against what its memory allows and against others' code."""
