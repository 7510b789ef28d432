"""Copies, and work of the host, at the speed of simulated links."""
