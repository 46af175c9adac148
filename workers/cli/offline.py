"""Makes a decision without a running picker, from a configuration, a request and endpoints in files. The code of workers makes the
decision.

The endpoints file has the format of file discovery. An entry may also have these fields:

    values: {waiting_requests: 3, kv_cache_usage: 0.5, active_models: [a, b]}    scraped values
    inFlight: 2                               requests in flight
    inFlightTokens: 4000                      tokens in flight
    cached: 0.8                               share of the prompt that the endpoint's prefix cache holds
    state: fresh | stale | unknown | down     default: fresh if there are values, otherwise unknown

No state stays between decisions: plugins that learn from requests start empty. If tenants are configured, the fairness id in the request's
headers names the tenant.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from epp.candidates import Candidates, Endpoint, EndpointList, Snapshot
from epp.config import parameters, yaml_nodes
from epp.config.findings import ConfigErrors, Findings, nearest
from epp.config.load import EffectiveConfig
from epp.config.tenants_section import tenants_of
from epp.data import COUNTED
from epp.decision import if_available
from epp.decision.decide import choose
from epp.decision.explain import Explanation, explain
from epp.errors import ProducerFailed, Refused
from epp.learning.local import LocalLearning
from epp.metrics.catalogue import plugin_groups
from epp.plugin import Hashes, Plugin, PrefixIndex, Profile
from epp.points import guard
from epp.protocol import codec
from epp.request import Subset, Tenant
from epp.request.client_headers import fairness_id
from epp.request.intake import REQUEST_ID, Intake
from epp.request.model_rewrite import compiled
from epp.request.paths import Parsers
from epp.request.tenants import UNKNOWN
from shm.areas import Area, Areas
from shm.prefills import local_prefills
from shm.segment import Region
from shm.series import SeriesWriter
from workers.host.yaml_files import DiscoveryError, read_file
from workers.process.layout import area_schema_of, series_schema_of
from workers.process.names import families
from workers.supervisor.endpoints.discovery import Entry, parse_file
from workers.supervisor.kube.object_kinds import Objects
from workers.worker.held import NoHeldBlocks
from workers.worker.services import WorkerServices

S = TypeVar("S", bound=WorkerServices)
SEED = 0  # the seed of the random numbers that break ties, so that every run decides alike
NO_OBJECTS = Objects()


class OfflineError(Exception):
    """Raised if no decision can be made. The text names the file, line and rule, or the plugin that failed."""


class OfflineRequest(NamedTuple):
    """The request to decide on. Header names are in lower case."""

    path: str
    headers: Mapping[str, str]
    body: bytes


class Known(msgspec.Struct, frozen=True, rename="camel"):
    """The further fields of an entry of the endpoints file: the scraped values, load and state to assume offline."""

    values: dict[str, float | list[str]] = {}
    in_flight: Annotated[int, msgspec.Meta(ge=0)] = 0
    in_flight_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    cached: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    state: Literal["", "fresh", "stale", "unknown", "down"] = ""

    @property
    def is_fresh(self) -> bool:
        return self.state == "fresh" or (not self.state and bool(self.values))


def decided(config: EffectiveConfig, offline_request: OfflineRequest, endpoints_file: str, objects: Objects = NO_OBJECTS) -> Explanation:
    """Decides on the request with these objectives and model rewrites, and explains the decision. Raises OfflineError."""
    entries, known = _read(endpoints_file)
    _check_names(config, endpoints_file, entries, known)
    return decided_on(config, offline_request, FilePool(config, entries, known), objects)


def decided_on(config: EffectiveConfig, offline_request: OfflineRequest, pool: "FilePool", objects: Objects = NO_OBJECTS) -> Explanation:
    """Decides on the request with the endpoints of `pool`, and explains the decision. Raises OfflineError."""
    return asyncio.run(_decided(config, offline_request, pool, objects))


async def _decided(config: EffectiveConfig, offline_request: OfflineRequest, pool: "FilePool", objects: Objects) -> Explanation:
    pipeline = config.pipeline
    services = worker_services(config, pool, WorkerServices)
    pipeline.start(services)
    if guard.declared(pipeline.wiring.plugins):  # as in workers, which also count the refused accesses
        pipeline = pipeline.wrapped(guard.guard(lambda _point, _plugin, _access: None))
    headers = codec.headers_of({REQUEST_ID: "offline", **offline_request.headers, ":path": offline_request.path})
    rewrite = partial(compiled(objects.rewrites).target, random=random.Random(SEED).random)
    intake = Intake(lambda: rewrite, lambda objective: objects.priorities.get(objective, 0))
    request = intake.begin(headers, time.monotonic(), len(offline_request.body), None, _tenant(config, headers))
    decision, refusal = None, None
    try:
        parser = Parsers(pipeline).find(request.path)
        intake.read(request, headers, pipeline, parser, offline_request.body)
        conditional = if_available.requested(headers)
        decision = await choose(if_available.conditional(pipeline) if conditional else pipeline, request, pool)
    except Refused as refused:
        refusal = refused
    finally:
        await services.close()
    return explain(pipeline, request, decision, refusal)


def _tenant(config: EffectiveConfig, headers: codec.Headers) -> Tenant | None:
    """Returns the tenant that the fairness id names, because offline no gateway vouches for a tenant. Returns None without tenants."""
    if config.tenants is None:
        return None
    return tenants_of(replace(config.tenants, sources=()), {}).named(fairness_id(headers) or UNKNOWN)


class OfflinePool(PrefixIndex, Protocol):
    """The part of a pool that the services of plugins use."""

    def candidates(self, subset: Subset | None) -> Candidates:
        """Returns all endpoints."""


class FilePool:
    """Serves as the `epp.decision.decide.EndpointPool` and as the prefix index. Both have the data of the endpoints file."""

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
            EndpointList(endpoints),
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

    def now(self) -> float:
        return 0.0

    def producer_failed(self, producer: Plugin, failure: ProducerFailed) -> None:
        raise OfflineError(f"a data producer failed: {failure}")

    def scorer_failed(self, problem: Exception) -> None:
        raise problem  # the author of the scorer wants to see the exception

    def shadow_failed(self, profile: Profile, problem: Exception) -> None:
        raise OfflineError(f"shadow profile '{profile.name}' failed: {problem!r}") from problem

    def match(self, hashes: Hashes) -> Mapping[int, int]:
        """Returns owner -> number of leading blocks that the owner holds."""
        held = {row + 1: round(known.cached * len(hashes)) for row, known in enumerate(self._known)}
        return {owner: blocks for owner, blocks in held.items() if blocks}

    def learn(self, hashes: Hashes, owner: int) -> None:
        """Does nothing, because no request follows."""

    def forget(self, hashes: Hashes, owner: int) -> None:
        """Does nothing, because no request follows."""


def _read(path: str) -> tuple[list[Entry], list[Known]]:
    try:
        data = read_file(path)
        parsed = parse_file(data, path)
    except DiscoveryError as error:
        raise OfflineError(str(error)) from error
    findings = Findings(path)
    root = yaml_nodes.read(data.decode("utf-8-sig"), findings)
    _refuse(findings)
    assert root is not None
    assert isinstance(root.value, dict)  # `parse_file` has checked it
    listed, entries = root.value["endpoints"].value, parsed.entries
    assert isinstance(listed, list)
    # fewer endpoints than entries: the remarks say which entry is given twice
    if parsed.faults or len(listed) != len(entries):
        raise OfflineError(str(DiscoveryError([*parsed.faults, *parsed.remarks])))
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
        raise OfflineError(str(errors)) from errors


def _check_names(config: EffectiveConfig, path: str, entries: Sequence[Entry], known: Sequence[Known]) -> None:
    columns = {key.name for scraped in config.sources for extractor in scraped.extractors for key in extractor.produces}
    for entry, fields in zip(entries, known, strict=True):
        for name in fields.values:
            if name not in columns:
                hint = nearest(name, columns) or f"known: {', '.join(sorted(columns))}"
                raise OfflineError(f"{path}: endpoint '{entry.name}': no extractor produces '{name}' ({hint})")


def _columns(config: EffectiveConfig, kind: type) -> list[str]:
    of_names = kind is frozenset
    return [c.name for c in config.pipeline.columns if (c.type is frozenset) == of_names and c.name not in COUNTED]


def _column(name: str, known: Sequence[Known]) -> Any:
    values = [k.values.get(name, np.nan) for k in known]
    return np.array([v if isinstance(v, (int, float)) else np.nan for v in values], dtype=np.float64)


def _names(name: str, known: Sequence[Known]) -> list[frozenset[str]]:
    values = [k.values.get(name, []) for k in known]
    return [frozenset(v) if isinstance(v, list) else frozenset() for v in values]


def worker_services(config: EffectiveConfig, pool: OfflinePool, kind: type[S]) -> S:
    """Returns the services that a worker gives to plugins, in private memory of this process. `pool`: also serves as the prefix index."""
    histograms = families(config.pipeline)
    schema = area_schema_of(histograms, slots=len(pool.candidates(None)) or 1, areas=1)
    area: Area = Areas(schema, Region(memoryview(bytearray(schema.bytes)))).area(0)
    labelled = {}
    for group in plugin_groups(m for plugin in config.pipeline.plugins.values() for m in plugin.metrics):
        series = series_schema_of(group, areas=1)
        labelled[group.name] = SeriesWriter(series, Region(memoryview(bytearray(series.bytes))))
    return kind(
        area,
        pool,
        prefix_seed=SEED,
        held_blocks=NoHeldBlocks(),
        prefills=local_prefills(),
        learning=LocalLearning(),
        rng=random.Random(SEED),
        measures={(f.plugin_name, f.metric.name): i for i, f in enumerate(histograms) if not f.extension_point},
        labelled=labelled,
        now=time.monotonic,
    )
