"""Long and packed sequences: a loss that never holds all logits, and documents side by side in one row."""
