"""The list of what a run holds: tensor, role, bytes, unit."""
