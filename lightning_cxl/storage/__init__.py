"""Bytes on drives: records that are read and written as one, and generations of them that survive a crash."""
