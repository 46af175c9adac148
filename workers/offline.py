"""A decision without a running picker: a configuration, a request and endpoints from files, through the code that serves.

The endpoints file is one for file discovery. Each entry may say what is known of it besides:

    values: {waiting_requests: 3, kv_cache_usage: 0.5, active_models: [a, b]}    as scraped
    inFlight: 2                               requests in flight
    inFlightTokens: 4000                      tokens in flight
    cached: 0.8                               share of the prompt that its prefix cache holds
    state: fresh | stale | unknown | down     fresh if there are values, else unknown

What this does not do: remember. Plugins that learn from one request for the next start empty.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from epp import client_headers, guard, if_available, parameters, yaml_nodes
from epp.candidates import Candidates, Endpoint, Roster, Snapshot
from epp.config import EffectiveConfig
from epp.data import COUNTED
from epp.decide import decide
from epp.errors import ProducerFailed, Refused
from epp.explain import Explanation, explain
from epp.findings import ConfigErrors, Findings, nearest
from epp.metrics import counter_groups
from epp.model_rewrite import compiled
from epp.paths import Parsers
from epp.plugin import DataProducer, Hashes, Profile
from epp.request import DEFAULT_FLOW, Request, Subset
from shm.lanes import Lane, Lanes
from shm.segment import Region
from shm.series import SeriesWriter
from workers.discovery import Entry, parse_file
from workers.instance import families, lane_schema_of, series_schema_of
from workers.object_kinds import Objects
from workers.renaming import parse_renamed
from workers.services import WorkerServices
from workers.yaml_files import DiscoveryError, read_file

SEED = 0  # ties are drawn alike every time
NO_OBJECTS = Objects()


class Wrong(Exception):
    """A file that cannot be used; the text names it, the line and the rule."""


class Asked(NamedTuple):
    """The request to decide on; header names in lower case."""

    path: str
    headers: Mapping[str, str]
    body: bytes


class Known(msgspec.Struct, frozen=True, rename="camel"):
    """What an entry of the endpoints file says besides who it is."""

    values: dict[str, float | list[str]] = {}
    in_flight: Annotated[int, msgspec.Meta(ge=0)] = 0
    in_flight_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    cached: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    state: Literal["", "fresh", "stale", "unknown", "down"] = ""

    @property
    def is_fresh(self) -> bool:
        return self.state == "fresh" or (not self.state and bool(self.values))


def decided(config: EffectiveConfig, asked: Asked, endpoints_file: str, objects: Objects = NO_OBJECTS) -> Explanation:
    """What the configuration decides on this request, with these objectives and model rewrites. Raises Wrong."""
    entries, known = _read(endpoints_file)
    _check_names(config, endpoints_file, entries, known)
    pool = FilePool(config, entries, known)
    return asyncio.run(_decided(config, asked, pool, objects))


async def _decided(config: EffectiveConfig, asked: Asked, pool: "FilePool", objects: Objects) -> Explanation:
    pipeline = config.pipeline
    services = _services(config, pool)
    pipeline.start(services)
    if guard.declared(pipeline.recipe.plugins):  # as workers do; who wants to know what was refused has their counter
        pipeline = pipeline.wrapped(guard.guard(lambda _point, _plugin, _access: None))
    request = Request(
        id=asked.headers.get("x-request-id", "offline"),
        path=asked.path,
        headers=asked.headers,
        now=time.monotonic(),
        body_bytes=len(asked.body),
        fairness_id=client_headers.fairness_id(asked.headers) or DEFAULT_FLOW,
        priority=objects.priorities.get(client_headers.objective(asked.headers), 0),
    )
    rewrite = partial(compiled(objects.rewrites).target, random=random.Random(SEED).random)
    decision, refusal = None, None
    try:
        parser, place = Parsers(pipeline).find(asked.path)
        parse_renamed(rewrite, parser, pipeline.parses[place], request, asked.body)
        for read in pipeline.request_header:
            read(request)
        conditional = if_available.asked(asked.headers)
        decision = await decide(if_available.conditional(pipeline) if conditional else pipeline, request, pool)
    except Refused as refused:
        refusal = refused
    finally:
        await services.close()
    return explain(pipeline, request, decision, refusal)


class FilePool:
    """`epp.decide.Pool` over an endpoints file; also the prefix index that it describes."""

    def __init__(self, config: EffectiveConfig, entries: Sequence[Entry], known: Sequence[Known]) -> None:
        endpoints = [
            Endpoint(
                name=entry.name,
                namespace=entry.namespace,
                host=entry.host,
                port=entry.port,
                labels=dict(entry.labels),
                slot=row,
                owner=row + 1,
            )
            for row, entry in enumerate(entries)
        ]
        self._known = known
        fresh = np.array([k.is_fresh for k in known], dtype=bool)
        snapshot = Snapshot(
            Roster(endpoints),
            {name: _column(name, known) for name in _columns(config, kind=float)},
            fresh=fresh,
            known=fresh | np.array([k.state in ("stale", "down") for k in known], dtype=bool),
            down=np.array([k.state == "down" for k in known], dtype=bool),
            inflight_at_scrape=np.array([float(k.in_flight) for k in known]),
            names={name: _names(name, known) for name in _columns(config, kind=frozenset)},
        )
        load = ([float(k.in_flight) for k in known], [float(k.in_flight_tokens) for k in known])
        self._all = Candidates(snapshot, *map(np.array, load))

    def candidates(self, subset: Subset | None) -> Candidates:
        return self._all

    def reloaded(self, candidates: Candidates) -> Candidates:
        return candidates

    def producer_failed(self, producer: DataProducer, failure: ProducerFailed) -> None:
        raise Wrong(f"a data producer failed: {failure}")

    def shadow_failed(self, profile: Profile, problem: Exception) -> None:
        raise Wrong(f"shadow profile '{profile.name}' failed: {problem!r}") from problem

    def match(self, hashes: Hashes) -> Mapping[int, int]:
        """Index owner -> leading blocks held."""
        held = {row + 1: round(known.cached * len(hashes)) for row, known in enumerate(self._known)}
        return {owner: blocks for owner, blocks in held.items() if blocks}

    def learn(self, hashes: Hashes, owner: int) -> None:
        """Nobody asks again."""

    def forget(self, hashes: Hashes, owner: int) -> None:
        """Nobody asks again."""


def _read(path: str) -> tuple[list[Entry], list[Known]]:
    try:
        data = read_file(path)
        parsed = parse_file(data, path)
    except DiscoveryError as wrong:
        raise Wrong(str(wrong)) from wrong
    findings = Findings(path)
    root = yaml_nodes.read(data.decode("utf-8-sig"), findings)
    _refuse(findings)
    assert root is not None
    assert isinstance(root.value, dict)  # as discovery has found
    listed, entries = root.value["endpoints"].value, parsed.entries
    assert isinstance(listed, list)
    if parsed.faults or len(listed) != len(entries):  # or one is given twice, as the remarks say
        raise Wrong(str(DiscoveryError([*parsed.faults, *parsed.remarks])))
    known = [
        parameters.decode(Known, node, f"endpoint '{entry.name}'", node.place, findings)
        for node, entry in zip(listed, entries, strict=True)
    ]
    _refuse(findings)
    return entries, [k for k in known if isinstance(k, Known)]


def _refuse(findings: Findings) -> None:
    try:
        findings.raise_errors()
    except ConfigErrors as errors:
        raise Wrong(str(errors)) from errors


def _check_names(config: EffectiveConfig, path: str, entries: Sequence[Entry], known: Sequence[Known]) -> None:
    columns = {key.name for key in config.extractor.produces}
    for entry, said in zip(entries, known, strict=True):
        for name in said.values:
            if name not in columns:
                hint = nearest(name, columns) or f"there are {', '.join(sorted(columns))}"
                raise Wrong(f"{path}: endpoint '{entry.name}': nothing scrapes '{name}'; {hint}")


def _columns(config: EffectiveConfig, kind: type) -> list[str]:
    of_names = kind is frozenset
    return [c.name for c in config.pipeline.columns if (c.type is frozenset) == of_names and c.name not in COUNTED]


def _column(name: str, known: Sequence[Known]) -> Any:
    values = [k.values.get(name, np.nan) for k in known]
    return np.array([v if isinstance(v, (int, float)) else np.nan for v in values], dtype=np.float64)


def _names(name: str, known: Sequence[Known]) -> list[frozenset[str]]:
    values = [k.values.get(name, []) for k in known]
    return [frozenset(v) if isinstance(v, list) else frozenset() for v in values]


def _services(config: EffectiveConfig, pool: FilePool) -> WorkerServices:
    """A worker's services over memory of this process's own."""
    made = families(config.pipeline)
    schema = lane_schema_of(made, slots=len(pool.candidates(None)) or 1, lanes=1)
    lane: Lane = Lanes(schema, Region(memoryview(bytearray(schema.bytes)))).lane(0)
    counters = {}
    for group in counter_groups(m for plugin in config.pipeline.plugins.values() for m in plugin.metrics):
        series = series_schema_of(group, lanes=1)
        counters[group.name] = SeriesWriter(series, Region(memoryview(bytearray(series.bytes))))
    return WorkerServices(
        lane,
        pool,
        prefix_seed=SEED,
        rng=random.Random(SEED),
        measures={(f.plugin_name, f.metric.name): i for i, f in enumerate(made) if not f.extension_point},
        counters=counters,
        now=time.monotonic,
    )
