"""The command `fit`: fine-tune a causal language model from the command line."""
