"""`bench`: kernels against memory and torch."""
