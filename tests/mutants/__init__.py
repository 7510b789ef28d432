"""Protections taken away one at a time: a test must notice each. ``python -m tests.mutants`` runs them."""
