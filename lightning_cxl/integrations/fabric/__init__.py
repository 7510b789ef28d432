"""The strategy for Lightning Fabric."""
