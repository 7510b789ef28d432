"""Policies that place a whole job at once."""
