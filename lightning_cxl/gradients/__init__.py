"""Gradients: copies to the host, accumulation, checks, and the step of an adopted optimizer."""
