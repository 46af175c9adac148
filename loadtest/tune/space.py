"""Which values of a configuration may change, and between which limits: the weights of scorers, and parameters with a tuned range."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from epp.config.schema import parameters_schema
from epp.plugin import Plugin, Scorer
from epp.points.parameters import RANGE, WEIGHT_FACTOR

LOG_FROM: Final = 20.0  # a range whose limits differ by this factor is searched by orders of magnitude
WEIGHT_MIN: Final = 1e-3
DIGITS: Final = 3
DEFAULT_WEIGHT: Final = 1.0
ADDED_WEIGHT: Final = 0.001  # the weight with which a search adds a scorer
ADDED_WEIGHT_MAX: Final = 64.0

Path = tuple[str | int, ...]


class Knob(NamedTuple):
    """One value that may change. `path`: its keys in the document. `now`: its value in the configuration."""

    name: str
    path: Path
    low: float
    high: float
    integer: bool
    now: float

    @property
    def log(self) -> bool:
        return self.low > 0 and self.high / self.low >= LOG_FROM

    def rounded(self, value: float) -> float:
        """Returns a value with few digits, so that a configuration stays readable."""
        return round(value) if self.integer else float(f"{value:.{DIGITS}g}")


def knobs(document: Mapping[str, Any], types: Mapping[str, type[Plugin]]) -> list[Knob]:
    """Returns the values of a checked configuration that may change."""
    listed: Sequence[Mapping[str, Any]] = document.get("plugins") or ()
    found = [knob for place, entry in enumerate(listed) for knob in _parameters(place, entry, types)]
    named = {entry.get("name") or entry["type"]: types[entry["type"]] for entry in listed if entry["type"] in types}
    for at, profile in enumerate(document.get("schedulingProfiles") or ()):
        if profile.get("shadow"):
            continue
        scorers = [
            (place, use)
            for place, use in enumerate(profile.get("plugins") or ())
            if issubclass(named.get(use["pluginRef"], Plugin), Scorer)
        ]
        for place, use in scorers if len(scorers) > 1 else ():  # the weight of an only scorer changes nothing
            path = ("schedulingProfiles", at, "plugins", place, "weight")
            now = float(use.get("weight", DEFAULT_WEIGHT))
            middle = now or DEFAULT_WEIGHT
            low, high = max(middle / WEIGHT_FACTOR, WEIGHT_MIN), middle * WEIGHT_FACTOR
            if now == ADDED_WEIGHT:
                high = ADDED_WEIGHT_MAX
            name = f"{profile.get('name', at)}/{use['pluginRef']} weight"
            found.append(Knob(name, path, low, high, integer=False, now=max(now, low)))
    return found


def with_scorers(document: Mapping[str, Any], added: Sequence[str], types: Mapping[str, type[Plugin]]) -> dict[str, Any]:
    """Returns a copy of a checked configuration in which each profile also has these scorers, with a weight that has hardly any effect.

    Raises ValueError if one of them is no scorer, or is there already.
    """
    result = copy.deepcopy(dict(document))
    listed = result["plugins"] = list(result.get("plugins") or ())
    for name in added:
        if not issubclass(types.get(name, Plugin), Scorer):
            raise ValueError(f"'{name}' is no scorer; `epp config plugins` lists them")
        if any(name in (entry["type"], entry.get("name")) for entry in listed):
            raise ValueError(f"'{name}' is in the configuration already")
        listed.append({"type": name})
        for profile in result.get("schedulingProfiles") or ():
            if not profile.get("shadow"):
                profile["plugins"] = [*(profile.get("plugins") or ()), {"pluginRef": name, "weight": ADDED_WEIGHT}]
    return result


def changed(document: Mapping[str, Any], values: Mapping[Path, float]) -> dict[str, Any]:
    """Returns a copy of the document with these values."""
    result = copy.deepcopy(dict(document))
    for path, value in values.items():
        part: Any = result
        for key in path[:-1]:
            if isinstance(part, dict) and part.get(key) is None:
                part[key] = {}
            part = part[key]
        part[path[-1]] = value
    return result


def _parameters(place: int, entry: Mapping[str, Any], types: Mapping[str, type[Plugin]]) -> Iterator[Knob]:
    cls = types.get(entry["type"])
    if cls is None:
        return
    schema = parameters_schema(cls)
    whole = schema.get("$defs", {}).get(schema.get("$ref", "").rpartition("/")[2], schema)
    given = entry.get("parameters") or {}
    for field in msgspec.structs.fields(cls.Params):
        limits = whole.get("properties", {}).get(field.encode_name, {})
        now = given.get(field.encode_name, field.default)
        if RANGE not in limits or not isinstance(now, int | float):
            continue
        low, high = limits[RANGE]
        integer = limits.get("type") == "integer"
        name = f"{entry.get('name') or entry['type']}.{field.encode_name}"
        yield Knob(name, ("plugins", place, "parameters", field.encode_name), low, high, integer, min(max(now, low), high))
