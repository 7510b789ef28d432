"""`python -m lightning_cxl`: a module or folder for each command."""
