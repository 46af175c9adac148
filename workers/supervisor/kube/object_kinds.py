"""Reads, checks and merges objects of two kinds, in either API group: InferenceObjective (a priority), InferenceModelRewrite (rules).

    a node of a file, or of an API object ─ read ─▶ Objective | ModelRewrite     raises Fault: what is wrong, and the line
    objects of one source                 ─ by_name ─▶ Found                      those of this pool, one per kind and name
    Found of the directory and of the API ─ merge ─▶ Objects                      what applies to requests

- Kind and name identify an object. If both API groups have it, the newer group wins.
- If the pool has a name, `poolRef` must equal the name and group of the pool; its kind is ignored. An object of another pool is ignored. In
  a directory, `poolRef` may also be a list of pools, and an object without `poolRef` is for all pools of the picker; the API server accepts
  no such objects.
- If the directory and the API have an object of the same kind and name, the object of the directory is used, because the directory is for
  this picker alone, and is readable while the API server is away.
- `creationTimestamp` gives the age of a rewrite. In files it may be missing: then the rewrite is taken as older than all rewrites with a
  time. Among rewrites of the same age, and among rewrites without a time, the directory comes before the API. The directory is ordered by
  file names and positions in the file, the API by names.

This module does not read files, send requests to an API server, or choose a rule (`epp.request.model_rewrite` does).
"""

import datetime
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from epp.request.model_rewrite import MODEL_CHARS_MAX, MODELS_MAX, RULES_MAX, TARGETS_MAX, WEIGHT_MAX, Rewrite, Rule, Target
from workers.host.options import POOL_GROUP
from workers.host.yaml_files import Fault, Node

VERSION: Final = "v1alpha2"
GROUPS: Final = ("llm-d.ai", "inference.networking.x-k8s.io")  # the newer one first
API_VERSIONS: Final = tuple(f"{group}/{VERSION}" for group in GROUPS)
OBJECTIVE: Final = "InferenceObjective"
REWRITE: Final = "InferenceModelRewrite"
KINDS: Final = (OBJECTIVE, REWRITE)
OBJECTIVE_FIELDS: Final = frozenset(("priority", "poolRef"))  # the fields of an objective's spec
EXACT: Final = "Exact"
PRIORITY_END: Final = 1 << 31
OBJECTS_MAX: Final = 4096  # limit for each kind
REFERENCES_MAX: Final = 256  # pools that one object names
REPORTED_MAX: Final = 4096
NAMED_MAX: Final = 8
REMARKED: Final = "remark on an object"  # the event in the log

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")


class PoolName(NamedTuple):
    """The name and API group of a pool. An empty name stands for any pool."""

    name: str = ""
    group: str = POOL_GROUP

    def __str__(self) -> str:
        return f"'{self.name}'" if self.group == POOL_GROUP else f"'{self.name}' of {self.group}"


class Objective(NamedTuple):
    """The priority of the requests that name this objective. `place`: as in Remark.

    `remarks`: warnings about allowed values that are probably mistakes.
    """

    name: str
    priority: int
    group: int  # index in GROUPS
    pools: tuple[PoolName, ...]  # (): all pools
    place: str
    remarks: tuple[str, ...] = ()
    kind: str = OBJECTIVE


class ModelRewrite(NamedTuple):
    """Rules that replace the model that a request names. The other fields are as in Objective."""

    name: str
    rewrite: Rewrite
    group: int
    pools: tuple[PoolName, ...]
    place: str
    remarks: tuple[str, ...] = ()
    kind: str = REWRITE


Object = Objective | ModelRewrite


class Found(NamedTuple):
    """The objects of one source, by name."""

    objectives: Mapping[str, Objective] = {}
    rewrites: Mapping[str, ModelRewrite] = {}


class Remark(NamedTuple):
    """A warning about a readable object. `place`: the file and line of the object, or its namespace and name."""

    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


class Objects(NamedTuple):
    """The objects that apply to requests: priorities by the name of the objective, and rewrites.

    The order of the rewrites decides among rewrites of the same age.
    """

    priorities: Mapping[str, int] = {}
    rewrites: Sequence[Rewrite] = ()


def read(node: Node, kind: str, version: str, place: str) -> Object:
    """Reads one object of this kind and apiVersion. `place` names it in reports.

    Raises Fault with the kind and name of the object, the field and the line.
    """
    if version not in API_VERSIONS:
        raise Fault(_line(node, "apiVersion"), f"apiVersion '{version[:128]}': {kind} needs {' or '.join(API_VERSIONS)}")
    name = ""
    try:
        metadata = child(node, "metadata") or Node(node.line, {})
        name = text(metadata, "name", "metadata")
        if not _NAME.fullmatch(name):
            why = "a name has up to 253 lower-case letters, digits, '-' and '.', and begins and ends with a letter or digit"
            raise Fault(_line(metadata, "name"), f"metadata.name: {why}")
        spec = child(node, "spec") or Node(node.line, {})
        pools, group = _pools(spec), API_VERSIONS.index(version)
        if kind == OBJECTIVE:
            return Objective(name, _priority(spec), group, pools, place, tuple(_unknown(spec, name)))
        rewrite = Rewrite(name, _created(metadata), tuple(_rules(spec)))
    except Fault as fault:
        raise Fault(fault.line, f"{kind} '{name[:128]}': {fault}") from None
    return ModelRewrite(name, rewrite, group, pools, place, tuple(_remarks(rewrite)))


def _pools(spec: Node) -> tuple[PoolName, ...]:
    if not isinstance(spec.value, dict):
        raise Fault(spec.line, "spec must be a mapping")
    reference = child(spec, "poolRef")
    if reference is None:
        return ()
    if not isinstance(reference.value, list):
        return (_pool(reference, "spec.poolRef"),)
    references = _list(spec, "poolRef", "spec", REFERENCES_MAX)
    if not references:
        raise Fault(_line(spec, "poolRef"), "spec.poolRef: the list is empty; leave poolRef out if the object is for all pools")
    return tuple(dict.fromkeys(_pool(each, f"spec.poolRef[{at}]") for at, each in enumerate(references)))


def _pool(reference: Node, where: str) -> PoolName:
    name = text(reference, "name", where)
    has_group = child(reference, "group") is not None  # "" is the core group
    return PoolName(name, text(reference, "group", where) if has_group else POOL_GROUP)


def _priority(spec: Node) -> int:
    priority = text(spec, "priority", "spec")
    if priority and not (_INTEGER.fullmatch(priority) and -PRIORITY_END <= int(priority) < PRIORITY_END):
        why = f"'{priority[:128]}' is not an integer from {-PRIORITY_END} to {PRIORITY_END - 1}"
        raise Fault(_line(spec, "priority"), f"spec.priority: {why}")
    return int(priority or 0)


def _unknown(spec: Node, name: str) -> Iterator[str]:
    """Yields remarks on unknown fields. No API server checks the fields of a file, so a misspelt `priority` would silently mean 0."""
    for key in sorted(spec.value.keys() - OBJECTIVE_FIELDS):
        yield f"{OBJECTIVE} '{name}': spec.{key[:128]} is not a known field and has no effect"


def _created(metadata: Node) -> float | None:
    created = text(metadata, "creationTimestamp", "metadata")
    if not created:
        return None
    try:
        when = datetime.datetime.fromisoformat(created)
        if when.tzinfo is None:
            raise ValueError
    except ValueError:
        why = f"'{created[:128]}' is not a time such as 2026-01-31T12:00:00Z"
        raise Fault(_line(metadata, "creationTimestamp"), f"metadata.creationTimestamp: {why}") from None
    return when.timestamp()


def _rules(spec: Node) -> Iterator[Rule]:
    if child(spec, "rules") is None:
        raise Fault(spec.line, "spec.rules: the list of rules is missing; write 'rules: []' if there are none")
    for at, node in enumerate(_list(spec, "rules", "spec", RULES_MAX)):
        yield _rule(node, f"spec.rules[{at}]")


def _rule(node: Node, where: str) -> Rule:
    if not isinstance(node.value, dict):
        raise Fault(node.line, f"{where}: a rule is a mapping with targets, and with matches unless it is for all models")
    matches = _list(node, "matches", where, MODELS_MAX)
    models = [_model(match, f"{where}.matches[{at}]") for at, match in enumerate(matches)]
    targets = _list(node, "targets", where, TARGETS_MAX)
    if not targets:
        raise Fault(_line(node, "targets"), f"{where}: no targets: name at least one model to use instead")
    chosen = tuple(_target(target, f"{where}.targets[{at}]") for at, target in enumerate(targets))
    return Rule(tuple(filter(None, models)) if matches else None, chosen)


def _model(match: Node, where: str) -> str:
    """Returns the model that a match names, or ""."""
    if not isinstance(match.value, dict):
        raise Fault(match.line, f"{where}: a match is a mapping with the field model")
    model = child(match, "model")
    if model is None:
        return ""
    kind = text(model, "type", f"{where}.model")
    if kind not in ("", EXACT):
        raise Fault(_line(model, "type"), f"{where}.model.type: '{kind[:128]}': the only type is {EXACT}")
    return _name(model, "value", f"{where}.model")


def _target(node: Node, where: str) -> Target:
    weight = text(node, "weight", where)
    if weight and not (_INTEGER.fullmatch(weight) and 1 <= int(weight) <= WEIGHT_MAX):
        why = f"'{weight[:128]}' is not an integer from 1 to {WEIGHT_MAX}; remove a target that should get no requests"
        raise Fault(_line(node, "weight"), f"{where}.weight: {why}")
    return Target(_name(node, "modelRewrite", where), int(weight) if weight else None)


def _name(node: Node, key: str, where: str) -> str:
    """Reads the name of a model under this key. Raises Fault."""
    name = text(node, key, where)
    if not name or len(name) > MODEL_CHARS_MAX or not name.isprintable():
        value = f"'{name[:128]}'" if name else "nothing"
        why = f"a model's name has 1 to {MODEL_CHARS_MAX} printable characters"
        raise Fault(_line(node, key), f"{where}.{key}: {value}: {why}")
    return name


def _remarks(rewrite: Rewrite) -> Iterator[str]:
    for at, rule in enumerate(rewrite.rules):
        where = f"{REWRITE} '{rewrite.name}': spec.rules[{at}]"
        if rule.models == ():
            yield f"{where} has matches, but none with a model: it never applies"
        unweighted = [target.model for target in rule.targets if target.weight is None]
        if unweighted and len(unweighted) < len(rule.targets):
            named = ", ".join(unweighted)
            yield f"{where} gives weights to some targets only: the targets without a weight are never chosen ({named})"


def child(node: Node, key: str) -> Node | None:
    """Returns the node under this key; None if the key is missing or its value is null."""
    found: Node | None = node.value.get(key) if isinstance(node.value, dict) else None
    return None if found is None or found.is_null else found


def text(node: Node, key: str, where: str = "") -> str:
    """Returns the scalar under this key as text; "" if it is missing. `where`: the path of `node`, for errors. Raises Fault."""
    if not isinstance(node.value, dict):
        raise Fault(node.line, f"{where} must be a mapping")
    found = child(node, key)
    if found is None:
        return ""
    if not isinstance(found.value, str):
        raise Fault(found.line, f"{where}{where and '.'}{key} must be one word, not a list or mapping")
    return found.value


def _list(node: Node, key: str, where: str, most: int) -> Sequence[Node]:
    found = child(node, key)
    if found is None:
        return ()
    if not isinstance(found.value, list):
        raise Fault(found.line, f"{where}.{key} must be a list")
    if len(found.value) > most:
        raise Fault(found.line, f"{where}.{key}: more than {most}")
    return found.value


def _line(node: Node, key: str) -> int:
    return node.value[key].line if isinstance(node.value, dict) and key in node.value else node.line


def by_name(objects: Iterable[Object], pool: PoolName, *, once: Callable[[Remark], None], faults: list[Remark]) -> Found:
    """Returns the objects of a source for this pool, in the order of the source, without duplicates.

    Calls `once` with a remark for each object of another pool, and with the remarks of all objects that it returns. Adds duplicates, and
    objects beyond the limit, to `faults`.
    """
    found: dict[str, dict[str, Object]] = {kind: {} for kind in KINDS}
    for each in objects:
        what = f"{each.kind} '{each.name}'"
        if pool.name and each.pools and pool not in each.pools:
            once(Remark(each.place, f"{what} is for pool {listed(each.pools)}, this is {pool}: it is left out"))
            continue
        known = found[each.kind]
        other = known.get(each.name)
        if other is not None and other.group == each.group:
            faults.append(Remark(each.place, f"{what} is given twice; first in {other.place}"))
        elif other is not None or len(known) < OBJECTS_MAX:
            known[each.name] = each if other is None or each.group < other.group else other
        else:
            faults.append(Remark(each.place, f"{what}: more than {OBJECTS_MAX} objects of this kind: it is left out"))
    objectives = {name: each for name, each in found[OBJECTIVE].items() if isinstance(each, Objective)}
    rewrites = {name: each for name, each in found[REWRITE].items() if isinstance(each, ModelRewrite)}
    kept: list[Object] = [*objectives.values(), *rewrites.values()]
    for thing in kept:
        for remark in thing.remarks:
            once(Remark(thing.place, remark))
    return Found(objectives, rewrites)


def by_pool(objects: Sequence[Object], pools: Sequence[PoolName], *, once: Callable[[Remark], None], faults: list[Remark]) -> list[Found]:
    """Does the same as `by_name` for each of several pools. Ignores an object of other pools, with a remark.

    Pools without objects of their own share the mappings.
    """
    served = frozenset(pools)
    named: set[PoolName] = set()
    kept: list[Object] = []
    for each in objects:
        if not each.pools or not served.isdisjoint(each.pools):
            named.update(each.pools)
            kept.append(each)
        else:
            names = "pools" if len(each.pools) > 1 else "pool"
            why = f"{each.kind} '{each.name}' is for {names} {listed(each.pools)}, not served here: it is left out"
            once(Remark(each.place, why))
    found: list[Found] = []
    shared: Found | None = None
    for pool in pools:
        if pool not in named and shared is not None:
            found.append(shared)
            continue
        found.append(by_name((each for each in kept if not each.pools or pool in each.pools), pool, once=once, faults=faults))
        if pool not in named:
            shared = found[-1]
    return found


def listed(pools: Sequence[PoolName]) -> str:
    """Returns the names of pools, for a report."""
    more = len(pools) - NAMED_MAX
    return ", ".join(map(str, pools[:NAMED_MAX])) + (f" and {more} more" if more > 0 else "")


def merge(directory: Found, api: Found, once: Callable[[Remark], None]) -> Objects:
    """Merges both sources. Calls `once` with a remark for each object that both have."""
    both: list[tuple[Object, Object]] = [(directory.objectives[n], api.objectives[n]) for n in directory.objectives.keys() & api.objectives]
    both += [(directory.rewrites[n], api.rewrites[n]) for n in directory.rewrites.keys() & api.rewrites]
    for winner, loser in sorted(both, key=lambda pair: pair[0][:1]):
        both_have = f"{winner.kind} '{winner.name}' is in the directory and in Kubernetes ({loser.place})"
        once(Remark(winner.place, f"{both_have}: the directory wins"))
    objectives = {**api.objectives, **directory.objectives}
    rewrites = [*directory.rewrites.values(), *(api.rewrites[n] for n in sorted(api.rewrites.keys() - directory.rewrites))]
    return Objects({name: each.priority for name, each in objectives.items()}, [each.rewrite for each in rewrites])


class Once:
    """Reports each remark once, and at most REPORTED_MAX remarks. Remarks with the same key are one remark.

    The default key is the text, so the same text about two places is reported once.
    """

    def __init__(self, report: Callable[..., None]) -> None:
        """`report` is called as `report(REMARKED, place=..., reason=...)`, like a method of a logger."""
        self._report = report
        self._keys: set[str] = set()

    def __call__(self, remark: Remark, key: str = "") -> None:
        key = key or remark.text
        if key not in self._keys and len(self._keys) < REPORTED_MAX:
            self._keys.add(key)
            self._report(REMARKED, place=remark.place, reason=remark.text)
