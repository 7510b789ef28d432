"""`python -m lightning_cxl`: a module for each command."""
