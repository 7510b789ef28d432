"""`plan`: what fits, and how long a step takes, before anything is loaded."""
