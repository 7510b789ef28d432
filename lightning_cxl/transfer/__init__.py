"""Copies between device and host memory: the only owner of streams and events."""
