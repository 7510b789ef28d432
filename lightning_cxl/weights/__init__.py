"""Safetensors files: loading into models, and saving; models of transformers."""
