"""Safetensors files into models and back; models of transformers."""
