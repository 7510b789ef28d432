"""Bytes with a known home: resources, pools, and the hook that makes torch allocate through them."""
