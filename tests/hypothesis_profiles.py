"""Profiles for ``--hypothesis-profile``: `same`, `new`, `few` and `many`.

`same` is the default. It tries the same examples in every run. `new` tries as many, others in every run: `make
test-rest` uses it. Both show the example that fails as it is; `new` also prints what ``@reproduce_failure`` takes.
`few` tries a tenth of the examples, `many` twenty times as many. These two try new ones, too, and look for the smallest
one that fails, which takes minutes.
"""

from hypothesis import Phase, settings

_PHASES = set(Phase) - {Phase.shrink, Phase.explain}
settings.register_profile("same", derandomize=True, phases=_PHASES)
settings.register_profile("new", derandomize=False, print_blob=True, phases=_PHASES)
settings.register_profile("few", max_examples=10)
settings.register_profile("many", max_examples=2000)
settings.load_profile("same")
