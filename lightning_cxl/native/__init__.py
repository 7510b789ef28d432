"""The compiled modules: kernels, pages of memory nodes, features of the CPU. Their sources are in `cython_ext/`."""
