"""Tiers that the modules of a model ask for: instances, `tier_rules`, decorated classes, in that precedence."""

import difflib
import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_cxl.errors import ConfigError, TierNotFoundError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.placement.decorators import (
    SPEC_FIELDS,
    TierSpec,
    check_field_on_ssd,
    class_spec,
    field_of_role,
    instance_spec,
)
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.ssd_options import SSD

_Choice = tuple[str, str]  # tier name, who asked for it


@dataclass(frozen=True, slots=True)
class ModuleTiers:
    """Requests of each module of one model; made by `resolve`."""

    choices: Mapping[str, Mapping[str, _Choice]]
    """Module name -> field of `TierSpec` -> (tier name, who asked)."""

    def lookup(self, module_name: str, role: TensorRole) -> tuple[str | None, str]:
        """Return (tier, who asked) for a role of a module; ``(None, "")`` leaves it to the policy.

        A module that was added to the model later answers as its nearest enclosing module that was there.
        """
        field = field_of_role(role)
        return (None, "") if field is None else self._fields(module_name).get(field, (None, ""))

    def _fields(self, module_name: str) -> Mapping[str, _Choice]:
        for name in _self_and_ancestors(module_name):
            if name in self.choices:
                return self.choices[name]
        return {}


def resolve(
    named_modules: Iterable[tuple[str, object]], rules: Mapping[str, Mapping[str, str] | str], topology: Topology
) -> ModuleTiers:
    """Resolve instance marks, rules and decorated classes for every module of a model.

    Precedence for each field by itself: an instance decorated with `tier` (the nearest of the module and those that
    enclose it), the last rule whose pattern matches the module's or an enclosing module's name, the nearest decorated
    class, the policy.

    Args:
        rules: name pattern (``fnmatch``; ``*`` also matches dots) -> tier for everything, or field -> tier.
    """
    modules = dict(named_modules)
    by_rule = _check_rules(rules, list(modules), topology)
    by_instance = {name: instance_spec(module) for name, module in modules.items()}
    by_class = {name: class_spec(type(module)) for name, module in modules.items()}
    for name, module in modules.items():
        _check_spec(by_instance[name], f"tier(...) on {_show(name, module)}", topology)
        _check_spec(by_class[name], f"the decorator on class {type(module).__name__}", topology)
    choices: dict[str, dict[str, _Choice]] = {}
    for name in modules:
        lineage = _self_and_ancestors(name)
        found: dict[str, _Choice] = {}
        for field in SPEC_FIELDS:
            choice = (
                _nearest(lineage, field, by_instance, "tier(...) on {name}", modules)
                or _last_rule(lineage, field, by_rule)
                or _nearest(lineage, field, by_class, "decorator on class {cls}", modules)
            )
            if choice is not None:
                found[field] = choice
        choices[name] = found
    return ModuleTiers(choices)


def _check_rules(
    rules: Mapping[str, Mapping[str, str] | str], names: list[str], topology: Topology
) -> dict[str, TierSpec]:
    specs = {}
    for pattern, wanted in rules.items():
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"tier_rules: {pattern!r} matches no module. {_closest(pattern, names)}")
        fields = dict.fromkeys(SPEC_FIELDS, wanted) if isinstance(wanted, str) else dict(wanted)
        for field in fields:
            if field not in SPEC_FIELDS:
                raise ConfigError(
                    f"tier_rules: {pattern!r} has an unknown field {field!r}; use {', '.join(SPEC_FIELDS)}"
                )
        specs[pattern] = TierSpec(**fields)
        _check_spec(specs[pattern], f"tier_rules: {pattern!r}", topology)
    return specs


def _check_spec(spec: TierSpec | None, source: str, topology: Topology) -> None:
    for field in SPEC_FIELDS if spec is not None else ():
        tier = getattr(spec, field)
        try:
            if tier is not None:
                topology.tier(tier)
        except TierNotFoundError:
            raise TierNotFoundError(
                f"{source} asks for {field} on tier {tier!r}; {topology.what_there_is(tier)}"
            ) from None
        if tier == SSD:
            check_field_on_ssd(field, source)


def _nearest(
    lineage: list[str],
    field: str,
    specs: Mapping[str, TierSpec | None],
    source: str,
    modules: Mapping[str, object],
) -> _Choice | None:
    for name in lineage:
        spec = specs.get(name)
        tier = None if spec is None else getattr(spec, field)
        if tier is not None:
            return tier, source.format(name=_show(name, modules[name]), cls=type(modules[name]).__name__)
    return None


def _last_rule(lineage: list[str], field: str, rules: Mapping[str, TierSpec]) -> _Choice | None:
    for pattern, spec in reversed(list(rules.items())):
        tier = getattr(spec, field)
        if tier is not None and any(fnmatch.fnmatchcase(name, pattern) for name in lineage):
            return tier, f"rule {pattern!r}"
    return None


def _self_and_ancestors(name: str) -> list[str]:
    """Return a module's name and those of all that enclose it, nearest first, ending with the root ``""``."""
    lineage = [name]
    while lineage[-1]:
        lineage.append(lineage[-1].rpartition(".")[0])
    return lineage


def _closest(pattern: str, names: list[str]) -> str:
    close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
    if close:
        return f"Closest: {', '.join(map(repr, close))}"
    top = [name for name in names if name and "." not in name]
    return f"The model has: {', '.join(map(repr, top))}"


def _show(name: str, module: object) -> str:
    return f"{name!r}" if name else f"the whole {type(module).__name__}"
