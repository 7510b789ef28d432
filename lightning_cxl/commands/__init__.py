"""`python -m lightning_cxl`: one module for each command."""
