"""Parts of `examples/bench/ssd.py`: the file and its contenders, and the turns that they take."""
