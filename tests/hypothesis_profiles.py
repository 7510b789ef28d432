"""Profiles for ``--hypothesis-profile``: `same`, `new`, `few` and `many`.

`same` is the default. It tries the same 40 examples in every run. `new`, which `make test-rest` uses, tries others
in every run. Both show the example that fails as it is; `new` also prints what ``@reproduce_failure`` takes.
`few` tries 10 examples, `many` 2000. These two try new ones, too, and look for the smallest one that fails, which
takes minutes. An example has no time limit: machines are shared.
"""

from hypothesis import Phase, settings

_PHASES = set(Phase) - {Phase.shrink, Phase.explain}
settings.register_profile("same", max_examples=40, derandomize=True, phases=_PHASES, deadline=None)
settings.register_profile("new", max_examples=40, derandomize=False, print_blob=True, phases=_PHASES, deadline=None)
settings.register_profile("few", max_examples=10, deadline=None)
settings.register_profile("many", max_examples=2000, deadline=None)
settings.load_profile("same")
