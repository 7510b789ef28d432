"""The main job: fine-tune a causal language model from the command line."""
