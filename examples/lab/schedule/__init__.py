"""Parts of `replay.py` and `sharded.py`: training steps on simulated links, and pictures of them."""
