"""Hypothesis profiles: `--hypothesis-profile=few` takes a tenth of the examples, `many` twenty times as many."""

from hypothesis import settings

settings.register_profile("few", max_examples=10)
settings.register_profile("many", max_examples=2000)
