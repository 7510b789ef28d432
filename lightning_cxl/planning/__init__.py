"""Placement, computed before any allocation: the job, policies, predicted seconds, the check whether it fits."""
