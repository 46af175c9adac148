"""Who produces what everyone consumes: checked before the fork, for all plugins of a configuration.

A consumed `Column` comes from one extractor, or the runtime counts it (`epp.data.COUNTED`); a
consumed `Datum` comes from one plugin that runs before the reader does (STAGES): a RequestHeader
plugin, a data producer or the profile handler. Keys are matched by name, then their types must be
equal. Producers form no cycle and run in an order in which each finds what it reads; among those
that do not depend on each other, the order of the configuration holds. An optional datum need not
be produced; where it is, the same rules hold. All who cut prompts into blocks have blocks of one size.

What nobody reads is not kept: columns are the union of what is consumed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from epp.data import COUNTED, INFLIGHT_REQUESTS, INFLIGHT_TOKENS, Column, Datum, Key
from epp.findings import nearest
from epp.metrics import Metric
from epp.plugin import (
    Admitter,
    DataProducer,
    Decider,
    Extractor,
    Filter,
    Picker,
    Plugin,
    PreRequest,
    ProfileHandler,
    RequestHeader,
    ResponseComplete,
    ResponseReceived,
    ResponseStreaming,
    Scorer,
    Screener,
)  # fmt: skip
from epp.prefix.match import CutsPrompts

HOOKS = (PreRequest, ResponseReceived, ResponseStreaming, ResponseComplete)
STAGES: tuple[tuple[type[Plugin], ...], ...] = (
    (RequestHeader,),
    (Screener,),
    (DataProducer,),
    (Admitter,),
    (ProfileHandler, Decider),
    (Filter, Scorer, Picker),
    HOOKS,
)
EMITTERS = (RequestHeader, DataProducer, ProfileHandler)
_RUNTIME: Mapping[str, Key[Any]] = {key.name: key for key in (INFLIGHT_REQUESTS, INFLIGHT_TOKENS)}
assert frozenset(_RUNTIME) == COUNTED


class Breach(NamedTuple):
    """A contract that does not hold; `plugin` is the instance where the reader should look."""

    plugin: str
    rule: str
    message: str
    hint: str = ""


class Checked(NamedTuple):
    """What holds for these plugins: producers in their order, columns sorted by name, and what does not."""

    producers: tuple[DataProducer, ...]
    columns: tuple[Column[Any], ...]
    breaches: tuple[Breach, ...]


def check(plugins: Sequence[Plugin]) -> Checked:
    """All contracts between these plugins."""
    breaches: list[Breach] = []
    columns = _producers_of(plugins, Extractor, Column, breaches)
    data = _producers_of(plugins, EMITTERS, Datum, breaches)
    for reader in plugins:
        for key in reader.consumes:
            breaches += _reading(reader, key, columns if isinstance(key, Column) else data)
        for datum in reader.optional:
            breaches += _reading(reader, datum, data) if datum.name in data else []
    breaches += _blocks([p for p in plugins if isinstance(p, CutsPrompts)])
    breaches += _metrics(plugins)
    producers, cycle = _in_order([p for p in plugins if isinstance(p, DataProducer)], data)
    return Checked(producers, _columns(plugins), (*breaches, *cycle))


def _blocks(cutters: Sequence[Plugin]) -> Iterable[Breach]:
    """Blocks of one size; said of those that differ from the last, which may be a default that nobody wrote down."""
    sizes = [cutter.block_tokens for cutter in cutters if isinstance(cutter, CutsPrompts)]
    for cutter, size in zip(cutters, sizes, strict=True):
        if size != sizes[-1]:
            why = f"{told(cutter)} has blocks of {size} tokens and {told(cutters[-1])} of {sizes[-1]}, and all share one index"
            yield Breach(cutter.name, "block-sizes", why, "give all the same blockSizeTokens, or remove one")


def _metrics(plugins: Sequence[Plugin]) -> Iterable[Breach]:
    """One metric for a name, whoever declares it: a page has one description of it."""
    first: dict[str, tuple[Plugin, Metric]] = {}
    for plugin in plugins:
        for metric in plugin.metrics:
            other, declared = first.setdefault(metric.name, (plugin, metric))
            if declared != metric:
                why = f"{told(plugin)} and {told(other)} declare the metric '{metric.name}' differently"
                yield Breach(
                    plugin.name, "metric-clash", why, "choose another name, or the same kind, help, buckets and labels"
                )


def unread(plugins: Sequence[Plugin]) -> list[Plugin]:
    """Data producers whose data nobody reads and that do nothing else; what only they read is unread too."""
    kept, dropped = list(plugins), list[Plugin]()
    while True:
        read = {(type(key), key.name) for reader in kept for key in (*reader.consumes, *reader.optional)}
        idle = [
            p
            for p in kept
            if isinstance(p, DataProducer)
            and not isinstance(p, (*HOOKS, RequestHeader, ProfileHandler))
            and not any((type(key), key.name) in read for key in p.produces)
        ]
        if not idle:
            return dropped
        dropped += idle
        kept = [p for p in kept if p not in idle]


def missing(plugins: Sequence[Plugin]) -> list[Datum[Any]]:
    """Data that are read and not produced, by name."""
    produced = {key.name for p in plugins if isinstance(p, EMITTERS) for key in p.produces}
    wanted = {key.name: key for p in plugins for key in p.consumes if isinstance(key, Datum)}
    return [wanted[name] for name in sorted(wanted) if name not in produced]


def told(plugin: Plugin) -> str:
    """An instance in words: its name, with its type and module where they say more."""
    cls = type(plugin)
    type_name = cls.type_name or cls.__qualname__
    kind = "" if type_name == plugin.name else f"type {type_name}, "
    return f"'{plugin.name}' ({kind}{cls.__module__})"


def _producers_of(
    plugins: Sequence[Plugin], kind: type[Plugin] | tuple[type[Plugin], ...], of: type[Key[Any]], breaches: list[Breach]
) -> dict[str, tuple[Plugin, Key[Any]]]:
    """Key name -> its one producer and its own declaration."""
    found: dict[str, tuple[Plugin, Key[Any]]] = {}
    for plugin in plugins:
        for key in plugin.produces if isinstance(plugin, kind) else ():
            if not isinstance(key, of):
                continue
            if of is Column and key.name in COUNTED:
                breaches.append(
                    Breach(
                        plugin.name,
                        "two-producers",
                        f"{told(plugin)} produces '{key.name}', which the picker counts itself",
                        "choose another name",
                    )
                )
                continue
            first, _ = found.setdefault(key.name, (plugin, key))
            if first is not plugin:
                breaches.append(
                    Breach(
                        plugin.name,
                        "two-producers",
                        f"{told(plugin)} and {told(first)} both produce '{key.name}'",
                        "keep one of them",
                    )
                )
    return found


def _reading(reader: Plugin, key: Key[Any], produced: Mapping[str, tuple[Plugin, Key[Any]]]) -> list[Breach]:
    """What is wrong between one reader and whoever produces the key."""
    column = isinstance(key, Column)
    if column and key.name in COUNTED:
        writer, written = "the picker", _RUNTIME[key.name]
    elif key.name in produced:
        plugin, written = produced[key.name]
        writer = told(plugin)
        if not column and max(_stages(reader), default=0) < min(_stages(plugin), default=0):
            message = f"{told(reader)} reads '{key.name}', which {writer} produces only after it has run"
            return [Breach(reader.name, "stage-order", message)]
    else:
        what = "no extractor" if column else "no data producer"
        hint = nearest(key.name, produced) if produced else ""
        return [
            Breach(
                reader.name,
                "no-producer",
                f"{told(reader)} reads '{key.name}', which {what} of this configuration produces",
                hint,
            )
        ]
    wrong = _differs(key, written)
    if wrong:
        message = f"{told(reader)} reads '{key.name}' as {wrong[0]}, {writer} produces it as {wrong[1]}"
        return [Breach(reader.name, "type-clash", message)]
    return []


def _stages(plugin: Plugin) -> list[int]:
    """Where in the order of STAGES a plugin runs."""
    return [number for number, kinds in enumerate(STAGES) if isinstance(plugin, kinds)]


def _differs(read: Key[Any], written: Key[Any]) -> tuple[str, str] | None:
    """Both sides' words for what does not agree."""
    if read.type is not written.type:
        return read.type.__name__, written.type.__name__
    if isinstance(read, Datum) and isinstance(written, Datum) and read.per_profile != written.per_profile:
        words = {True: "per profile", False: "shared over the request"}
        return words[read.per_profile], words[written.per_profile]
    if isinstance(read, Column) and isinstance(written, Column) and read.worst != written.worst:
        return f"worst='{read.worst}'", f"worst='{written.worst}'"
    return None


def _columns(plugins: Iterable[Plugin]) -> tuple[Column[Any], ...]:
    """The union of what is read, by name."""
    columns = {key.name: key for p in plugins for key in p.consumes if isinstance(key, Column)}
    return tuple(columns[name] for name in sorted(columns))


def _in_order(
    producers: list[DataProducer], data: Mapping[str, tuple[Plugin, Key[Any]]]
) -> tuple[tuple[DataProducer, ...], list[Breach]]:
    """Each producer after those whose data it reads."""
    ordered: list[DataProducer] = []
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
    def waits(plugin: Plugin) -> list[tuple[str, Plugin]]:
        keys = (key.name for key in (*plugin.consumes, *plugin.optional) if isinstance(key, Datum) and key.name in data)
        return [(name, data[name][0]) for name in keys if any(data[name][0] is p for p in left)]

    return waits


def _cycle(left: Sequence[Plugin], waits: Waits) -> Breach:
    """Follows the first wait of each until one comes twice."""
    path = [left[0]]
    steps: list[str] = []
    while True:
        name, producer = waits(path[-1])[0]
        steps.append(f"{told(path[-1])} reads '{name}' of {told(producer)}")
        if any(producer is seen for seen in path):
            start = next(i for i, seen in enumerate(path) if seen is producer)
            return Breach(
                producer.name, "producer-cycle", "data producers wait for each other: " + ", ".join(steps[start:])
            )
        path.append(producer)
