"""Bytes on a known tier: resources, pools, and the hook that makes torch allocate through them."""
