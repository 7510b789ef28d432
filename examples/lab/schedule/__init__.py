"""Parts of `overlap.py`: a training step on simulated links, what it could be at best, and pictures of it."""
