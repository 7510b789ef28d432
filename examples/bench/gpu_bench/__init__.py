"""Parts of `examples/bench/gpu.py`: shapes, contenders, and what one child process measures."""
