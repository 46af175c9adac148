"""Names of the Gateway API Inference Extension (GIE), versions 0.5 to 1.5, that this picker does not have, and what replaces them.

    plugin types with another name           `epp config check --migrate` renames them
    parameters of the prefix cache           the command moves them to the producer
    filters that rank by load (version 0.5)  scorers do their work; it replaces them in profiles
    plugin types that were split             a hint says what to list instead

Source: `pkg/epp` and `cmd/epp/runner` of github.com/kubernetes-sigs/gateway-api-inference-extension, tags v0.5.0 to v1.5.0. The reference
picker refuses all of these names, too.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from epp.config.edit import Removed

Mappings = dict[str, Any]

RENAMED: Final[Mapping[str, str]] = {
    "kv-cache-scorer": "kv-cache-utilization-scorer",
    "model-server-protocol-metrics": "core-metrics-extractor",
}
SCORERS: Final[Mapping[str, str]] = {  # a filter that keeps the least loaded endpoints -> the scorer that does its work
    "least-kv-cache-filter": "kv-cache-utilization-scorer",
    "least-queue-filter": "queue-scorer",
    "lora-affinity-filter": "lora-affinity-scorer",
    "low-queue-filter": "queue-scorer",
}
TREE: Final = "decision-tree-filter"
SPLIT: Final[Mapping[str, str]] = {
    "predicted-latency-scorer": "predicted-latency-producer with latency-scorer",
    "slo-aware-profile-handler": "predicted-latency-producer with latency-slo-admitter and latency-scorer",
}
PREFIX_SCORER: Final = "prefix-cache-scorer"
PREFIX_PRODUCER: Final = "approx-prefix-cache-producer"
BLOCK_TOKENS: Final = "blockSizeTokens"
IN_CHARACTERS: Final = ("blockSize", "hashBlockSize")  # the size in characters: in versions 1.1 to 1.4, and in 0.5 and 1.0
CHARACTERS_PER_TOKEN: Final = 4  # the factor that GIE uses
CACHE: Final = (
    "autoTune", BLOCK_TOKENS, *IN_CHARACTERS, "lruCapacityPerServer", "maxPrefixBlocksToMatch", "maxPrefixTokensToMatch",
)  # fmt: skip
DOES_IT: Final = "epp config check --migrate writes that"
RANDOM_PICKER, BEST_PICKER = "random-picker", "max-score-picker"
PRODUCER_NAME: Final = "prefixMatchInfoProducerName"


def instead(type_name: str) -> str:
    """Returns a hint that says what to write instead of a plugin type of GIE; "" for any other type."""
    if newer := RENAMED.get(type_name):
        return f"its name is '{newer}' now; {DOES_IT}"
    if scorer := SCORERS.get(type_name):
        return f"version 1.0 of GIE removed it: '{scorer}' does its work; {DOES_IT}"
    if type_name == TREE:
        return f"version 1.0 of GIE removed it: scorers do the work of its filters; {DOES_IT}"
    if type_name in SPLIT:
        return f"it is split: list {SPLIT[type_name]}"
    return ""


def moved(type_name: str) -> Mapping[str, str]:
    """Returns older parameter of a plugin type -> a hint that says where the parameter is in a current configuration."""
    if type_name != PREFIX_SCORER:
        return {}
    to = f"it belongs to {PREFIX_PRODUCER}"
    return {name: f"{to}, as '{BLOCK_TOKENS}'" if name in IN_CHARACTERS else to for name in CACHE}


def name_of(entry: Mappings) -> str:
    """Returns the name by which references call an entry of `plugins`."""
    return str(entry.get("name") or entry.get("type"))


# Parameters of the prefix cache.


def move_cache_parameters(plugins: list[Any], remarks: list[str]) -> None:
    """Moves the cache's parameters from scorers to the producers that these scorers read. Adds missing producers to `plugins`."""
    for entry in list(_of_type(plugins, PREFIX_SCORER)):
        given = entry.get("parameters")
        if not isinstance(given, dict) or not any(name in given for name in CACHE):
            continue
        target = str(given.get(PRODUCER_NAME) or PREFIX_PRODUCER)
        producer = next((one for one in _entries(plugins) if name_of(one) == target), None)
        if producer is None:
            producer = {"type": PREFIX_PRODUCER} | ({"name": target} if target != PREFIX_PRODUCER else {})
            plugins.append(producer)
        if producer.get("type") != PREFIX_PRODUCER:
            remarks.append(f"not migrated: the cache parameters of '{name_of(entry)}' stay: '{target}' has none of them")
            continue
        _give(producer, _cache_of(given, name_of(entry), remarks), name_of(entry), remarks)
        kept = {name: value for name, value in given.items() if name not in CACHE}
        if kept:
            entry["parameters"] = kept
        else:
            del entry["parameters"]


def _cache_of(given: Mappings, owner: str, remarks: list[str]) -> Mappings:
    """Returns the producer's parameters that correspond to those of the scorer. In the scorer, 0 meant the default."""
    settings: Mappings = {
        name: value for name, value in given.items() if name in CACHE and name not in IN_CHARACTERS and (value or name == "autoTune")
    }
    characters = next((given[name] for name in IN_CHARACTERS if given.get(name)), None)
    if isinstance(characters, int) and BLOCK_TOKENS not in settings:
        tokens = settings[BLOCK_TOKENS] = max(1, round(characters / CHARACTERS_PER_TOKEN))
        remarks.append(f"changed: the block size of '{owner}' was {characters} characters; it is {tokens} tokens now")
    return settings


def _give(producer: Mappings, settings: Mappings, owner: str, remarks: list[str]) -> None:
    """Adds parameters to a producer. Parameters that the producer already has stay."""
    given = producer.get("parameters")
    known: Mappings = given if isinstance(given, dict) else {}
    for name, value in settings.items():
        if known.setdefault(name, value) != value:
            remarks.append(
                f"changed: '{name}: {value}' of '{owner}' is dropped: all scorers that read '{name_of(producer)}' share its value"
            )
    if known:
        producer["parameters"] = known


# Filters by load.


def replace_filters(document: Mappings, plugins: list[Any], remarks: list[str]) -> None:
    """In `plugins` and in the profiles, replaces filters by load, and trees of such filters, with scorers."""
    scorers = _scorers(plugins)
    if not scorers:
        return
    profiles = document.get("schedulingProfiles")
    for profile in profiles if isinstance(profiles, list) else ():
        members = profile.get("plugins") if isinstance(profile, dict) else None
        if isinstance(members, list) and any(_ref(member) in scorers for member in members):
            _replace_members(members, scorers, plugins)
    named = set(_refs({key: value for key, value in document.items() if key != "plugins"}))
    for place, entry in enumerate(plugins):
        if isinstance(entry, dict) and name_of(entry) == RANDOM_PICKER and RANDOM_PICKER not in named:
            plugins[place] = Removed
    remarks.append(
        f"changed: {', '.join(sorted(scorers))}: scorers rank the endpoints that these filters dropped, without their thresholds, and "
        "the best endpoint is picked"
    )


def _scorers(plugins: list[Any]) -> Mapping[str, list[str]]:
    """Turns entries of filters into entries of scorers, one of each type. Returns name of a filter or tree -> names of its scorers."""
    by_type = {str(entry.get("type")): name_of(entry) for entry in _entries(plugins)}
    found: dict[str, list[str]] = {}
    for place, entry in enumerate(plugins):
        scorer = SCORERS.get(str(entry.get("type"))) if isinstance(entry, dict) else None
        if scorer is None:
            continue
        found[name_of(entry)] = [by_type.setdefault(scorer, scorer)]
        if scorer in {str(one.get("type")) for one in _entries(plugins)}:
            plugins[place] = Removed
        else:
            entry.pop("name", None)
            entry.pop("parameters", None)
            entry["type"] = scorer
    for place, entry in enumerate(plugins):
        if isinstance(entry, dict) and entry.get("type") == TREE:
            leaves = [name for leaf in _refs(entry.get("parameters")) for name in found.get(leaf, ())]
            found[name_of(entry)] = list(dict.fromkeys(leaves))
            plugins[place] = Removed
    return found


def _replace_members(members: list[Any], scorers: Mapping[str, list[str]], plugins: list[Any]) -> None:
    """In one profile, names scorers instead of filters, and the picker plugin for the best endpoint instead of a random one."""
    present = {_ref(member) for member in members}
    for place, member in enumerate(list(members)):
        if (filtered := _ref(member)) in scorers:
            new = [name for name in scorers[filtered] if name not in present]
            present.update(new)
            members[place] = {"pluginRef": new[0]} if new else Removed
            members += [{"pluginRef": name} for name in new[1:]]
        elif picker := next((entry for entry in _of_type(plugins, RANDOM_PICKER) if name_of(entry) == filtered), None):
            if not any(_of_type(plugins, BEST_PICKER)):
                plugins.append({**picker, "type": BEST_PICKER} | ({"name": BEST_PICKER} if "name" in picker else {}))
            member["pluginRef"] = name_of(next(_of_type(plugins, BEST_PICKER)))


def _entries(plugins: list[Any]) -> Iterator[Mappings]:
    return (entry for entry in plugins if isinstance(entry, dict))


def _of_type(plugins: list[Any], type_name: str) -> Iterator[Mappings]:
    return (entry for entry in _entries(plugins) if entry.get("type") == type_name)


def _ref(member: Any) -> str:
    return str(member.get("pluginRef", "")) if isinstance(member, dict) else ""


def _refs(value: Any) -> Iterator[str]:
    """Yields the names in `pluginRef` fields at any depth, in order."""
    for key, child in value.items() if isinstance(value, dict) else ():
        if key == "pluginRef":
            yield str(child)
        else:
            yield from _refs(child)
    for child in value if isinstance(value, list) else ():
        yield from _refs(child)
