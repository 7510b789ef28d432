"""Weights of models and files: building without weights, loading, saving."""
