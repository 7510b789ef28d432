"""Bytes on drives: records that are read and written together, and generations of them that survive a crash."""
