"""Everything decided before a byte is taken."""
