"""What Kubernetes objects say to the picker: InferenceObjective (a priority) and InferenceModelRewrite (rules), of either API group.

    a node of a file, or of an API object ─ read ─▶ Objective | ModelRewrite     Fault: what is wrong, and the line
    objects of a source                   ─ by_name ─▶ Found                      of this pool, the newer group's of a name
    Found of directory and of API         ─ together ─▶ Objects                   what counts

- An object is known by kind and name. Given by both API groups, that of the newer group counts.
- `poolRef` has to equal the pool's name and group, where the pool has a name; its kind is not looked at. An object of another pool
  is left out. One without `poolRef` is of the pool that its directory is for; the API server lets none pass.
- Of a name in both sources the directory's counts: it was given to this picker alone, and stays while the API server is away.
- The age of a rewrite is its `creationTimestamp`. One without (in a file) is older than all that have one; such stand in the
  order of file names and of their places there. Those of one age stand in that order too, the directory's before the API's, and the
  API's by name.

What this does not do: read files, ask an API server, or choose a rule (`epp.model_rewrite` does).
"""

import datetime
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from epp.model_rewrite import MODEL_CHARS_MAX, MODELS_MAX, RULES_MAX, TARGETS_MAX, WEIGHT_MAX, Rewrite, Rule, Target
from workers.kube.pool import POOL_GROUP
from workers.yaml_files import Fault, Node

VERSION: Final = "v1alpha2"
GROUPS: Final = ("llm-d.ai", "inference.networking.x-k8s.io")  # the newer one first
API_VERSIONS: Final = tuple(f"{group}/{VERSION}" for group in GROUPS)
OBJECTIVE: Final = "InferenceObjective"
REWRITE: Final = "InferenceModelRewrite"
KINDS: Final = (OBJECTIVE, REWRITE)
OBJECTIVE_FIELDS: Final = frozenset(("priority", "poolRef"))  # of its spec
EXACT: Final = "Exact"
PRIORITY_END: Final = 1 << 31
OBJECTS_MAX: Final = 4096  # of each kind
SAID_MAX: Final = 4096

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")


class PoolName(NamedTuple):
    """A pool as objects refer to it; without a name it is whatever they mean."""

    name: str = ""
    group: str = POOL_GROUP

    def __str__(self) -> str:
        return f"'{self.name}'" if self.group == POOL_GROUP else f"'{self.name}' of {self.group}"


class Objective(NamedTuple):
    """How important the requests are that name it. `remarks`: what is allowed, and hardly meant."""

    name: str
    priority: int
    group: int  # in GROUPS
    pool: PoolName | None
    place: str
    remarks: tuple[str, ...] = ()
    kind: str = OBJECTIVE


class ModelRewrite(NamedTuple):
    """By which names models are asked for. `remarks` as above."""

    name: str
    rewrite: Rewrite
    group: int
    pool: PoolName | None
    place: str
    remarks: tuple[str, ...] = ()
    kind: str = REWRITE


Object = Objective | ModelRewrite


class Found(NamedTuple):
    """What one source says, by name."""

    objectives: Mapping[str, Objective] = {}
    rewrites: Mapping[str, ModelRewrite] = {}


class Objects(NamedTuple):
    """What counts: priorities by the name of their objective, rewrites in order, those of one age."""

    priorities: Mapping[str, int] = {}
    rewrites: Sequence[Rewrite] = ()


def read(node: Node, kind: str, version: str, place: str) -> Object:
    """One object of this kind and apiVersion. Raises Fault, with its kind and name and where in it something is wrong."""
    if version not in API_VERSIONS:
        raise Fault(
            _line(node, "apiVersion"), f"apiVersion '{version[:128]}': {kind} is of {' or '.join(API_VERSIONS)}"
        )
    name = ""
    try:
        metadata = child(node, "metadata") or Node(node.line, {})
        name = text(metadata, "name", "metadata")
        if not _NAME.fullmatch(name):
            why = "a name has up to 253 lower-case letters, digits, '-' and '.'"
            raise Fault(_line(metadata, "name"), f"metadata.name: {why}")
        spec = child(node, "spec") or Node(node.line, {})
        pool, group = _pool(spec), API_VERSIONS.index(version)
        if kind == OBJECTIVE:
            return Objective(name, _priority(spec), group, pool, place, tuple(_unknown(spec, name)))
        rewrite = Rewrite(name, _created(metadata), tuple(_rules(spec)))
    except Fault as fault:
        raise Fault(fault.line, f"{kind} '{name[:128]}': {fault}") from None
    return ModelRewrite(name, rewrite, group, pool, place, tuple(_remarks(rewrite)))


def _pool(spec: Node) -> PoolName | None:
    if not isinstance(spec.value, dict):
        raise Fault(spec.line, "spec is a mapping")
    reference = child(spec, "poolRef")
    if reference is None:
        return None
    name = text(reference, "name", "spec.poolRef")
    given = child(reference, "group") is not None  # "" is the core group
    return PoolName(name, text(reference, "group", "spec.poolRef") if given else POOL_GROUP)


def _priority(spec: Node) -> int:
    given = text(spec, "priority", "spec")
    if given and not (_INTEGER.fullmatch(given) and -PRIORITY_END <= int(given) < PRIORITY_END):
        why = f"'{given[:128]}' is not an integer from {-PRIORITY_END} to {PRIORITY_END - 1}"
        raise Fault(_line(spec, "priority"), f"spec.priority: {why}")
    return int(given or 0)


def _unknown(spec: Node, name: str) -> Iterator[str]:
    """In a file nobody else says so: a misspelt priority would be 0."""
    for key in sorted(spec.value.keys() - OBJECTIVE_FIELDS):
        yield f"{OBJECTIVE} '{name}': spec.{key[:128]} is no field that is known here and has no effect"


def _created(metadata: Node) -> float | None:
    given = text(metadata, "creationTimestamp", "metadata")
    if not given:
        return None
    try:
        when = datetime.datetime.fromisoformat(given)
        if when.tzinfo is None:
            raise ValueError
    except ValueError:
        why = f"'{given[:128]}' is no time such as 2026-01-31T12:00:00Z"
        raise Fault(_line(metadata, "creationTimestamp"), f"metadata.creationTimestamp: {why}") from None
    return when.timestamp()


def _rules(spec: Node) -> Iterator[Rule]:
    if child(spec, "rules") is None:
        raise Fault(spec.line, "spec.rules: no list of rules; write 'rules: []' if there are none")
    for at, node in enumerate(_list(spec, "rules", "spec", RULES_MAX)):
        yield _rule(node, f"spec.rules[{at}]")


def _rule(node: Node, where: str) -> Rule:
    if not isinstance(node.value, dict):
        raise Fault(node.line, f"{where}: a rule is a mapping with targets, and matches unless it is for all models")
    matches = _list(node, "matches", where, MODELS_MAX)
    models = [_model(match, f"{where}.matches[{at}]") for at, match in enumerate(matches)]
    targets = _list(node, "targets", where, TARGETS_MAX)
    if not targets:
        raise Fault(_line(node, "targets"), f"{where}: no targets: name at least one model to ask for instead")
    chosen = tuple(_target(target, f"{where}.targets[{at}]") for at, target in enumerate(targets))
    return Rule(tuple(filter(None, models)) if matches else None, chosen)


def _model(match: Node, where: str) -> str:
    """What is matched; empty: nothing."""
    if not isinstance(match.value, dict):
        raise Fault(match.line, f"{where}: a match is a mapping with model")
    model = child(match, "model")
    if model is None:
        return ""
    kind = text(model, "type", f"{where}.model")
    if kind not in ("", EXACT):
        raise Fault(_line(model, "type"), f"{where}.model.type: '{kind[:128]}': the one type is {EXACT}")
    return _name(model, "value", f"{where}.model")


def _target(node: Node, where: str) -> Target:
    given = text(node, "weight", where)
    if given and not (_INTEGER.fullmatch(given) and 1 <= int(given) <= WEIGHT_MAX):
        why = f"'{given[:128]}' is not an integer from 1 to {WEIGHT_MAX}; leave out a target that is to get nothing"
        raise Fault(_line(node, "weight"), f"{where}.weight: {why}")
    return Target(_name(node, "modelRewrite", where), int(given) if given else None)


def _name(node: Node, key: str, where: str) -> str:
    """A model's, as requests have it."""
    name = text(node, key, where)
    if not name or len(name) > MODEL_CHARS_MAX or not name.isprintable():
        said = f"'{name[:128]}'" if name else "nothing"
        why = f"a model's name has 1 to {MODEL_CHARS_MAX} printable characters"
        raise Fault(_line(node, key), f"{where}.{key}: {said}: {why}")
    return name


def _remarks(rewrite: Rewrite) -> Iterator[str]:
    for at, rule in enumerate(rewrite.rules):
        where = f"{REWRITE} '{rewrite.name}': spec.rules[{at}]"
        if rule.models == ():
            yield f"{where} has matches, and none with a model: it never applies"
        unweighted = [target.model for target in rule.targets if target.weight is None]
        if unweighted and len(unweighted) < len(rule.targets):
            named = ", ".join(unweighted)
            yield f"{where} gives weights to some targets only: those without are never chosen ({named})"


def child(node: Node, key: str) -> Node | None:
    """What is under this key; None: nothing, or null."""
    found: Node | None = node.value.get(key) if isinstance(node.value, dict) else None
    return None if found is None or found.is_null else found


def text(node: Node, key: str, where: str = "") -> str:
    """The word under this key; empty: none. `where` is the node's place. Raises Fault."""
    if not isinstance(node.value, dict):
        raise Fault(node.line, f"{where} is a mapping")
    found = child(node, key)
    if found is None:
        return ""
    if not isinstance(found.value, str):
        raise Fault(found.line, f"{where}{where and '.'}{key} is one word, not a list or mapping")
    return found.value


def _list(node: Node, key: str, where: str, most: int) -> Sequence[Node]:
    found = child(node, key)
    if found is None:
        return ()
    if not isinstance(found.value, list):
        raise Fault(found.line, f"{where}.{key} is a list")
    if len(found.value) > most:
        raise Fault(found.line, f"{where}.{key}: more than {most}")
    return found.value


def _line(node: Node, key: str) -> int:
    return node.value[key].line if isinstance(node.value, dict) and key in node.value else node.line


def by_name(objects: Iterable[Object], pool: PoolName, *, once: Callable[[str, str], None], faults: list[str]) -> Found:
    """A source's objects of this pool, in their order. `once` is told what is left out and what is remarkable, each with a key."""
    found: dict[str, dict[str, Object]] = {kind: {} for kind in KINDS}
    for each in objects:
        what = f"{each.kind} '{each.name}'"
        if pool.name and each.pool is not None and each.pool != pool:
            said = f"{what} is for pool {each.pool}, this is {pool}: it is left out"
            once(f"{each.place}: {said}", said)
            continue
        known = found[each.kind]
        other = known.get(each.name)
        if other is not None and other.group == each.group:
            faults.append(f"{each.place}: {what} is given twice; first in {other.place}")
        elif other is not None or len(known) < OBJECTS_MAX:
            known[each.name] = each if other is None or each.group < other.group else other
        else:
            faults.append(f"{each.place}: {what}: more than {OBJECTS_MAX} objects of this kind: it is left out")
    objectives = {name: each for name, each in found[OBJECTIVE].items() if isinstance(each, Objective)}
    rewrites = {name: each for name, each in found[REWRITE].items() if isinstance(each, ModelRewrite)}
    counting: list[Object] = [*objectives.values(), *rewrites.values()]
    for counts in counting:
        for remark in counts.remarks:
            once(f"{counts.place}: {remark}", remark)
    return Found(objectives, rewrites)


def together(directory: Found, api: Found, once: Callable[[str, str], None]) -> Objects:
    """What counts of both sources. `once` is told of names that both have."""
    both: list[tuple[Object, Object]] = [
        (directory.objectives[n], api.objectives[n]) for n in directory.objectives.keys() & api.objectives
    ]
    both += [(directory.rewrites[n], api.rewrites[n]) for n in directory.rewrites.keys() & api.rewrites]
    for own, other in sorted(both, key=lambda pair: pair[0][:1]):
        said = f"{own.kind} '{own.name}' is in the directory and in Kubernetes ({other.place}): the directory's counts"
        once(f"{own.place}: {said}", said)
    objectives = {**api.objectives, **directory.objectives}
    rewrites = [
        *directory.rewrites.values(),
        *(api.rewrites[n] for n in sorted(api.rewrites.keys() - directory.rewrites)),
    ]
    return Objects({name: each.priority for name, each in objectives.items()}, [each.rewrite for each in rewrites])


class Once:
    """Says each thing once; a bounded number of things."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._said: set[str] = set()

    def __call__(self, text: str, key: str) -> None:
        if key not in self._said and len(self._said) < SAID_MAX:
            self._said.add(key)
            self._report(text)
