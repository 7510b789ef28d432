"""`bench`: kernels against memory."""
