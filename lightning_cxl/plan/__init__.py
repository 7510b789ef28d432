"""``python -m lightning_cxl plan``: does a job fit, where would it lie, how long would a step take."""
