"""The accelerator for Hugging Face Accelerate; the only importer of Accelerate."""
