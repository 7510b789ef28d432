"""Which memory tiers exist and which tensor goes to which: pure Python, no torch."""
