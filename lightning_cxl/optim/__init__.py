"""The update on the host: CPU Adam, its kernels and its state, and master weights."""
