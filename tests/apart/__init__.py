"""A device that is apart, played by the CPU: what a test needs of a GPU where there is none. See README.md."""

from tests.apart.backend import load
from tests.apart.build import BuildError, why_unavailable
from tests.apart.controls import (
    HostUsage,
    clear_violations,
    counters,
    empty_host_cache,
    halfway,
    host_register,
    host_unregister,
    host_usage,
    paused,
    poison,
    poison_host,
    reset,
    set_capacity,
    set_delay,
    set_poison,
    violations,
)
from tests.apart.timeline import Entry, overlap, timeline

__all__ = [
    "BuildError",
    "Entry",
    "HostUsage",
    "clear_violations",
    "counters",
    "empty_host_cache",
    "halfway",
    "host_register",
    "host_unregister",
    "host_usage",
    "load",
    "overlap",
    "paused",
    "poison",
    "poison_host",
    "reset",
    "set_capacity",
    "set_delay",
    "set_poison",
    "timeline",
    "violations",
    "why_unavailable",
]
