"""Policies that see a whole job before they place the first tensor of it."""
