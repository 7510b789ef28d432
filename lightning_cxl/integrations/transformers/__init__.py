"""What lets the Trainer of transformers, and those built on it, use our accelerator."""
