"""Long and packed sequences: a loss that never holds all logits, and several documents in one row."""
