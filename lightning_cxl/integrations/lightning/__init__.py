"""The strategy for Lightning; the only importer of Lightning."""
