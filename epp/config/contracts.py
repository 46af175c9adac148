"""Data contracts: checks, before the fork, that the data that plugins read is produced by a plugin or by the runtime.

A consumed `Column` comes from one extractor, or the runtime counts it (`epp.data.COUNTED`). A consumed `Datum` comes from one plugin that
runs before its reader (STAGES): a RequestHeader plugin, a data producer or the profile handler. Keys match by name; then their types must
be equal. Producers must not form a cycle. Each producer runs after the producers whose data it reads; otherwise the configuration sets the
order. An optional datum need not be produced; if it is, the same rules hold. All plugins that cut prompts into blocks must use one block
size.

Columns that no plugin reads are not kept: `Checked.columns` has only consumed columns.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from epp import plugin as points
from epp.config.findings import nearest
from epp.data import COUNTED, INFLIGHT_REQUESTS, INFLIGHT_TOKENS, Column, Datum, Key
from epp.metrics import Metric
from epp.plugin import Plugin
from epp.prefix.match import CutsPrompts

HOOKS = (points.PreRequest, points.ResponseReceived, points.ResponseStreaming, points.ResponseComplete)
STAGES: tuple[tuple[type[Plugin], ...], ...] = (
    (points.RequestHeader,),
    (points.Screener,),
    (points.DataProducer,),
    (points.Admitter,),
    (points.ProfileHandler, points.Decider),
    (points.Filter, points.Scorer, points.Picker),
    HOOKS,
)
EMITTERS = (points.RequestHeader, points.DataProducer, points.ProfileHandler)
_RUNTIME: Mapping[str, Key[Any]] = {key.name: key for key in (INFLIGHT_REQUESTS, INFLIGHT_TOKENS)}
assert frozenset(_RUNTIME) == COUNTED


class Breach(NamedTuple):
    """Describes a broken contract. `plugin` is the instance at which the error is reported."""

    plugin: str
    rule: str
    message: str
    hint: str = ""


class Checked(NamedTuple):
    """Holds the result of `check`: producers in the order in which they run, columns sorted by name, and broken contracts."""

    producers: tuple[points.DataProducer, ...]
    columns: tuple[Column[Any], ...]
    breaches: tuple[Breach, ...]


def check(plugins: Sequence[Plugin]) -> Checked:
    """Checks all contracts between these plugins."""
    breaches: list[Breach] = []
    columns = _producers_of(plugins, points.Extractor, Column, breaches)
    data = _producers_of(plugins, EMITTERS, Datum, breaches)
    for reader in plugins:
        for key in reader.consumes:
            breaches += _reading(reader, key, columns if isinstance(key, Column) else data)
        for datum in reader.optional:
            breaches += _reading(reader, datum, data) if datum.name in data else []
    breaches += _blocks([p for p in plugins if isinstance(p, CutsPrompts)])
    breaches += _metrics(plugins)
    producers, cycle = _in_order([p for p in plugins if isinstance(p, points.DataProducer)], data)
    read = {key.name: key for p in plugins for key in p.consumes if isinstance(key, Column)}
    return Checked(producers, tuple(read[name] for name in sorted(read)), (*breaches, *cycle))


def _blocks(cutters: Sequence[Plugin]) -> Iterable[Breach]:
    """Checks that all plugins that cut prompts use one block size.

    The error is reported at each plugin whose size differs from that of the last one, since the last one may be a default that no file
    lists.
    """
    sizes = [cutter.block_tokens for cutter in cutters if isinstance(cutter, CutsPrompts)]
    for cutter, size in zip(cutters, sizes, strict=True):
        if size != sizes[-1]:
            last = described(cutters[-1])
            why = f"{described(cutter)} has blocks of {size} tokens and {last} of {sizes[-1]}, but all share one index"
            yield Breach(cutter.name, "block-sizes", why, "give all of them the same blockSizeTokens, or remove one")


def _metrics(plugins: Sequence[Plugin]) -> Iterable[Breach]:
    """Checks that plugins declare a metric of one name alike, since a metrics page describes each name once."""
    first: dict[str, tuple[Plugin, Metric]] = {}
    for plugin in plugins:
        for metric in plugin.metrics:
            other, declared = first.setdefault(metric.name, (plugin, metric))
            if declared != metric:
                why = f"{described(plugin)} and {described(other)} declare the metric '{metric.name}' differently"
                yield Breach(plugin.name, "metric-clash", why, "use another name, or the same kind, help, buckets and labels")


def unread(plugins: Sequence[Plugin]) -> list[Plugin]:
    """Returns the data producers whose only effect would be data that no plugin reads.

    Plugins that this function returns are not treated as readers.
    """
    kept, dropped = list(plugins), list[Plugin]()
    while True:
        read = {(type(key), key.name) for reader in kept for key in (*reader.consumes, *reader.optional)}
        idle = [
            p
            for p in kept
            if isinstance(p, points.DataProducer)
            and not isinstance(p, (*HOOKS, points.RequestHeader, points.ProfileHandler))
            and not any((type(key), key.name) in read for key in p.produces)
        ]
        if not idle:
            return dropped
        dropped += idle
        kept = [p for p in kept if p not in idle]


def missing(plugins: Sequence[Plugin]) -> list[Datum[Any]]:
    """Returns the data that plugins read and no plugin produces, sorted by name."""
    produced = {key.name for p in plugins if isinstance(p, EMITTERS) for key in p.produces}
    wanted = {key.name: key for p in plugins for key in p.consumes if isinstance(key, Datum)}
    return [wanted[name] for name in sorted(wanted) if name not in produced]


def described(plugin: Plugin) -> str:
    """Describes an instance for messages: its name, its type if the name differs, and its module."""
    cls = type(plugin)
    type_name = cls.type_name or cls.__qualname__
    kind = "" if type_name == plugin.name else f"type {type_name}, "
    return f"'{plugin.name}' ({kind}{cls.__module__})"


def _producers_of(
    plugins: Sequence[Plugin], kind: type[Plugin] | tuple[type[Plugin], ...], of: type[Key[Any]], breaches: list[Breach]
) -> dict[str, tuple[Plugin, Key[Any]]]:
    """Returns name of a key -> (producer, the key as the producer declares it). Adds a breach for every further producer of a key."""
    producers: dict[str, tuple[Plugin, Key[Any]]] = {}
    for plugin in plugins:
        for key in plugin.produces if isinstance(plugin, kind) else ():
            if not isinstance(key, of):
                continue
            if of is Column and key.name in COUNTED:
                why = f"{described(plugin)} produces '{key.name}', which the picker counts itself"
                breaches.append(Breach(plugin.name, "two-producers", why, "choose another name"))
                continue
            first, _ = producers.setdefault(key.name, (plugin, key))
            if first is not plugin:
                why = f"{described(plugin)} and {described(first)} both produce '{key.name}'"
                breaches.append(Breach(plugin.name, "two-producers", why, "keep one of them"))
    return producers


def _reading(reader: Plugin, key: Key[Any], produced: Mapping[str, tuple[Plugin, Key[Any]]]) -> list[Breach]:
    """Returns the broken contracts between one reader of a key and the producer of the key. `produced`: as `_producers_of` returns it."""
    column = isinstance(key, Column)
    if column and key.name in COUNTED:
        writer, written = "the picker", _RUNTIME[key.name]
    elif key.name in produced:
        plugin, written = produced[key.name]
        writer = described(plugin)
        if not column and max(_stages(reader), default=0) < min(_stages(plugin), default=0):
            message = f"{described(reader)} reads '{key.name}' before {writer} produces it"
            return [Breach(reader.name, "stage-order", message)]
    else:
        what = "no extractor" if column else "no data producer"
        hint = nearest(key.name, produced) if produced else ""
        why = f"{described(reader)} reads '{key.name}', which {what} of this configuration produces"
        return [Breach(reader.name, "no-producer", why, hint)]
    difference = _difference(key, written)
    if difference:
        message = f"{described(reader)} reads '{key.name}' as {difference[0]}, but {writer} produces it as {difference[1]}"
        return [Breach(reader.name, "type-clash", message)]
    return []


def _stages(plugin: Plugin) -> list[int]:
    return [number for number, kinds in enumerate(STAGES) if isinstance(plugin, kinds)]


def _difference(read: Key[Any], written: Key[Any]) -> tuple[str, str] | None:
    """Says in words what the reader and the producer of a key declare differently. Returns None if they agree."""
    if read.type is not written.type:
        return read.type.__name__, written.type.__name__
    if isinstance(read, Datum) and isinstance(written, Datum) and read.per_profile != written.per_profile:
        words = {True: "per profile", False: "per request"}
        return words[read.per_profile], words[written.per_profile]
    if isinstance(read, Column) and isinstance(written, Column) and read.worst != written.worst:
        return f"worst='{read.worst}'", f"worst='{written.worst}'"
    return None


def _in_order(
    producers: list[points.DataProducer], data: Mapping[str, tuple[Plugin, Key[Any]]]
) -> tuple[tuple[points.DataProducer, ...], list[Breach]]:
    """Orders producers so that each runs after the producers whose data it reads. Returns a breach if there is a cycle."""
    ordered: list[points.DataProducer] = []
    left = list(producers)
    while left:
        waits = _waiting_for(left, data)
        ready = next((p for p in left if not waits(p)), None)
        if ready is None:
            return tuple(ordered), [_cycle(left, waits)]
        ordered.append(ready)
        left.remove(ready)
    return tuple(ordered), []


Waits = Callable[[Plugin], list[tuple[str, Plugin]]]


def _waiting_for(left: Sequence[Plugin], data: Mapping[str, tuple[Plugin, Key[Any]]]) -> Waits:
    """Returns a function that lists (key, producer) for the data that a plugin reads from producers that are `left` to be ordered."""

    def waits(plugin: Plugin) -> list[tuple[str, Plugin]]:
        keys = (key.name for key in (*plugin.consumes, *plugin.optional) if isinstance(key, Datum) and key.name in data)
        return [(name, data[name][0]) for name in keys if any(data[name][0] is p for p in left)]

    return waits


def _cycle(left: Sequence[Plugin], waits: Waits) -> Breach:
    """Describes one cycle: from a producer, follows the first key that it waits for to the next producer, until a producer repeats."""
    path = [left[0]]
    steps: list[str] = []
    while True:
        name, producer = waits(path[-1])[0]
        steps.append(f"{described(path[-1])} reads '{name}' of {described(producer)}")
        if any(producer is seen for seen in path):
            start = next(i for i, seen in enumerate(path) if seen is producer)
            why = "data producers wait for each other: " + ", ".join(steps[start:])
            return Breach(producer.name, "producer-cycle", why, "remove one of them")
        path.append(producer)
