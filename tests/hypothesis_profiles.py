"""Profiles for ``--hypothesis-profile``: `same`, the default; `few`, a tenth of the examples; `many`, twenty times.

`same` tries the same examples in every run, and shows the one that fails as it is. The other two try new ones and look
for the smallest one that fails, which takes minutes.
"""

from hypothesis import Phase, settings

settings.register_profile("same", derandomize=True, phases=set(Phase) - {Phase.shrink, Phase.explain})
settings.register_profile("few", max_examples=10)
settings.register_profile("many", max_examples=2000)
settings.load_profile("same")
