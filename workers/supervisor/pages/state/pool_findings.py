"""Finds the faults of each of several pools: gives the rules about a pool only the state of this pool. Pure, as `findings`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from workers.shared.doctor_report import ERROR, WARNING, Finding
from workers.supervisor.pages.state.finding_texts import Values

SHARED: Final = "The same in "  # the beginning of the title of a finding about several pools
SAME_MAX: Final = 20  # the number of pools with the same finding that are named one by one
OF: Final = " of pool "
PARTS: Final = ("bands", "flows")
UNSERVED_FIX: Final = (
    "change the port in the endpointPickerRef of the InferencePool, or start without --pool-ports or with one that has it; "
    "the Service of the picker needs the port, too"
)
OF_POOLS: Final = ("flow_control", "out_of_service")


def by_pool(values: Values, endpoints: Mapping[str, Values]) -> Iterator[tuple[str, Values, Mapping[str, Values]]]:
    """Yields each pool with the state of a picker that has only this pool, for the rules about a pool."""
    members: dict[str, dict[str, Values]] = {name: {} for name in values["pools"]}
    for key, each in endpoints.items():
        members.setdefault(each.get("pool", ""), {})[key] = each
    for name in values["pools"]:
        yield name, of_pool(values, name), members[name]


def of_pool(values: Values, pool: str) -> Values:
    """Returns the part of the state about one pool, without its endpoints."""
    own: dict[str, Any] = {part: [each for each in values.get(part) or () if each.get("pool") == pool] for part in PARTS}
    end = f"{OF}{pool}"
    own["left_out"] = {name.removesuffix(end): workers for name, workers in values.get("left_out", {}).items() if name.endswith(end)}
    own["settings"] = settings_of(values, pool)
    own |= {part: found for part in OF_POOLS if (found := values["pools"].get(pool, {}).get(part)) is not None}
    return own


def settings_of(values: Values, pool: str) -> Values:
    """Returns the configuration of a pool in the form of `settings`."""
    every: Sequence[Values] = values.get("settings", {}).get("configurations", ())
    return next((each for each in every if pool in each["pools"]), {})


def in_pool(pool: str, found: Iterable[Finding]) -> Iterator[Finding]:
    """Yields findings that name the pool."""
    for each in found:
        yield msgspec.structs.replace(each, title=f"Pool {pool}: {each.title}", pool=pool)


def unserved(values: Values, _endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    """Yields the InferencePools that this picker could serve but does not, with the reasons. Also says if it has found no InferencePool."""
    why: Mapping[str, str] = values.get("pools_unserved", {})
    for name, reason in why.items():
        yield Finding("pool-not-served", ERROR, f"InferencePool {name} is not served", reason, UNSERVED_FIX)
    if values.get("pools") == {} and not why:
        flags = values.get("settings", {}).get("flags", {})
        service = flags.get("service-name", {}).get("value", "")
        wanted = f"no InferencePool names Service '{service}' in its endpointPickerRef" if service else "none of --pool-name exists"
        fix = "create one in the namespace of --pool-namespace: `kubectl get inferencepools` lists those that exist"
        yield Finding("no-pools", WARNING, "The picker has found no pool yet", wanted, fix)


def fewer(found: Iterable[Finding]) -> Iterator[Finding]:
    """Yields the findings. If more than SAME_MAX pools share a finding, joins the findings of the further pools."""
    more: dict[str, list[Finding]] = {}
    seen: dict[str, int] = {}
    for each in found:
        if each.pool is not msgspec.UNSET:
            seen[each.rule] = seen.get(each.rule, 0) + 1
            if seen[each.rule] > SAME_MAX:
                more.setdefault(each.rule, []).append(each)
                continue
        yield each
    for rule, others in more.items():
        names = ", ".join(str(each.pool) for each in others[:SAME_MAX])
        text = f"{names}{f' and {len(others) - SAME_MAX} more' if len(others) > SAME_MAX else ''}; with --pool NAME, epp doctor shows one"
        yield Finding(rule, others[0].severity, f"{SHARED}{len(others)} more pools", text, others[0].fix)
