"""Takes looks at the shared memory of one instance, mapped read-only.

A look copies row by row, so the values of two processes may be from slightly different times. In a large prefix index, a look counts the
entries of an evenly spread sample of the buckets, so that it takes the same time for every size.

This module does not compare looks, and does not decide what a terminal shows.
"""

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from epp.candidates import Endpoint
from epp.learning.state import UnusableModel, decode
from epp.learning.words import in_words
from epp.metrics import POOL
from epp.metrics.kv_events import REPLAYS_FAILED
from epp.metrics.request_series import ATTEMPTS, ISOLATION, PREDICTION, SALT_IGNORED, SCHEDULER_ATTEMPTS, USAGE_BEYOND_BOUNDS
from epp.plugins.producers.tokenizer import WITHOUT_TOKENS
from shm import observe
from shm.areas import Areas, AreaSchema
from shm.documents import DocumentReader, DocumentSchema
from shm.flow_areas import WAITING
from shm.layout import Schema
from shm.observe import Life, Seen
from shm.prefix_index import IndexSchema
from shm.segment import Segment, SegmentError
from shm.table import TableCopy, TableReader, TableSchema
from workers.process.layout import GENERATION, gauge_of_pool
from workers.shared import reload_status
from workers.shared.documents import EndpointsView, PoolNames
from workers.shared.objectives import ObjectivesView
from workers.shared.query_of_death import TRIED
from workers.supervisor.pages.kv_events import NOT_FOLLOWED
from workers.supervisor.pages.state.attached import Attached, Counted, IndexCounts
from workers.supervisor.pages.state.figures import ENDPOINTS_AT_ONCE, last
from workers.supervisor.pages.state.look import AreaLook, BandLook, Configuration, EndpointLook, Look, Others, counter_name, tryout_figures
from workers.supervisor.pages.state.served import Served
from workers.worker.telemetry.cache_prediction import sums

GONE_S = 1.0  # if the parent is gone and no process has sent a heartbeat for this time, all processes are dead
COUNTED_BUCKETS_MAX = 1 << 17  # buckets of the prefix index that one look counts
DOUBTED_MAX = 16  # endpoints with implausible reports of usage, or of cached tokens, that are named one by one

S = TypeVar("S", bound=Schema)
PickKey = tuple[str, ...]


class Source:
    """Reads the shared memory of one instance. Raises SegmentError if the memory cannot be attached or read.

    `areas`, `table`, `predictions`, `served`, `flow`: the readers that `sampler` uses, too. `flow`: the flow areas of the first pool, or
    None if flow control is off.
    """

    def __init__(
        self, seen: Seen, run_dir: str, segments: Iterable[Segment] | None = None, *, counted_buckets: int = COUNTED_BUCKETS_MAX
    ) -> None:
        """`segments`: the segments that this process has mapped already; None: maps them by their names.

        `counted_buckets`: the largest number of buckets of the prefix index that a look counts.
        """
        self.seen = seen
        self._run_dir = run_dir
        self._had_parent = os.path.exists(f"/proc/{seen.pid}")  # False if the picker runs in another container
        self._attached = attached = Attached(seen, segments)
        table, rows = attached.required(TableSchema)
        documents, blobs = attached.required(DocumentSchema)
        areas, words = attached.required(AreaSchema)
        self.table = TableReader(table, rows)
        reader = DocumentReader(documents, blobs)
        self._endpoints = EndpointsView(reader)
        self._objectives = ObjectivesView(reader, ())
        self._names = PoolNames(reader, seen.pools)
        self.areas = Areas(areas, words)
        self._index = IndexCounts(*attached.required(IndexSchema), counted_buckets)
        self._streams = attached.streams()
        self._remotes = attached.remotes()
        self._flows = attached.flows(self.areas)
        self.flow = next(iter(self._flows), None)
        self._status = attached.document("reload")
        self._latency = attached.document("latency")
        series = functools.cache(lambda name: attached.series(name, self.areas))
        self._attempts, self.predictions = series(ATTEMPTS.name), series(PREDICTION.name)
        self._isolation, self._tokenless = series(ISOLATION.name), series(WITHOUT_TOKENS.name)
        self.served = Served(series, several=self._names.several)

    def pools(self) -> Sequence[str]:
        """Returns the present name of each of several pools, and "" for a place without a pool. Empty if the picker has one pool."""
        return self._names.current()

    def queued(self) -> list[int]:
        """Returns the requests that wait in flow control, for each pool."""
        return [flow.total(WAITING) for flow in self._flows]

    def slots_of_pools(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Returns the slot of each endpoint that discovery knows, and the number of its pool."""
        self.known()
        return self._endpoints.slots, np.array(self._endpoints.pools(), np.intp)

    def close(self) -> None:
        """Unmaps the segments. Do not take a look afterwards."""
        self._attached.close()

    def look(self, now: float) -> Look:
        """Copies all values. `now`: monotonic time in seconds."""
        return last(self.looking(now))

    def looking(self, now: float) -> Generator[None, None, Look]:
        """Returns the look. Yields after each short step, so that a caller can do other work in between."""
        areas = self.areas
        ordinals = zip(areas.ages(now), areas.successions(), strict=True)
        counted = self._index.counted()
        yield
        endpoints = yield from self._endpoint_looks(now, counted)
        histograms = {name: counts for name, (counts, _) in areas.histograms().items()}
        flows = self.served.flows()
        yield
        return Look(
            at=now,
            areas=tuple(self._area(index, age, starts) for index, (age, starts) in enumerate(ordinals)),
            counters=self.counters(),
            histograms={**histograms, **self.served.histograms()},
            bounds={**dict(areas.schema.histograms), **self.served.bounds},
            endpoints=tuple(endpoints),
            index=self._index.look(counted),
            bands=self.served.bands() if self._names.several else self._bands(now),
            pools=self.served.pools(self.pools(), self.queued(), self._configurations()),
            left_out=self._left_out(),
            configuration=self._configuration() if not self._names.several else None,
            others=self._others(now),
            errors=self.served.errors(),
            flows=flows,
            outcomes=self.served.outcomes(),
        )

    def counters(self) -> dict[str, int]:
        """Returns the counters of the areas, and of some series a counter per row: `usage_beyond_bounds_total@ENDPOINT` for endpoints with
        implausible reports of usage, and `requests_without_tokens_total@SERVER REASON`. Also returns the failed replays of KV events.
        """
        counters, series = self.areas.counters(), self.predictions
        if self._streams is not None:
            counters[REPLAYS_FAILED.name] = self._streams.replays_failed()
        if self._tokenless is not None:
            server_at, reason_at = (self._tokenless.schema.labels.index(label) for label in WITHOUT_TOKENS.labels)
            for row, values in self._tokenless.rows().items():
                server, reason = row[server_at], row[reason_at]
                name = counter_name(WITHOUT_TOKENS, f"{server} {reason}")
                counters[name] = counters.get(name, 0) + values.counters[0]
        if series is None:
            return counters
        labels, ints, _, _ = series.totals()
        for metric in (USAGE_BEYOND_BOUNDS, SALT_IGNORED):
            counts = ints[:, series.schema.counter_at[metric.name] - series.schema.values_at]
            doubted = np.flatnonzero(counts)[:DOUBTED_MAX].tolist()
            counters |= {counter_name(metric, labels[row][0]): int(counts[row]) for row in doubted}
        return counters

    def ended(self, now: float) -> str:
        """Returns why the instance has ended, or "" while it lives."""
        current = observe.instance(self._run_dir, self.seen.name)
        name = f"{self.seen.name} (pid {self.seen.pid})"
        if current is None:
            return f"{name} has stopped" if min(self.areas.ages(now)) > GONE_S else ""  # its file may have been removed
        if (current.pid, current.segments) != (self.seen.pid, self.seen.segments):
            return f"{name} has stopped; another one runs under its name"
        gone = self._had_parent and not os.path.exists(f"/proc/{self.seen.pid}") and min(self.areas.ages(now)) > GONE_S
        if gone or observe.life(self.seen.pid, self.seen.segments, now) is Life.DEAD:
            return f"{name} has died"
        return ""

    def _area(self, index: int, age: float, starts: int) -> AreaLook:
        area, schema = self.areas.area(index), self.areas.schema
        gauges = zip(schema.scalar, area.scalars.tolist(), strict=True)
        return AreaLook(
            serving=self.areas.serving(index),
            heartbeat_age_s=age,
            starts=starts,
            gauges={name: value for name, value in gauges if name not in TRIED},
            counters=dict(zip(schema.counter, area.counters.tolist(), strict=True)),
            inflight=int(np.asarray(area.inflight).sum()),
        )

    def _endpoint_looks(self, now: float, counted: Counted) -> Generator[None, None, list[EndpointLook]]:
        """Returns the looks at all endpoints. Yields after each ENDPOINTS_AT_ONCE."""
        copy, endpoints, pools = self.table.copy(), self.known(), self._endpoints.pools()
        rows = len(copy.rows)
        requests, tokens = self.areas.inflight(rows).tolist(), self.areas.tokens(rows).tolist()
        picks = self._picks()
        compared = sums(self.predictions) if self.predictions is not None else {}
        streams = self._streams.streams(now) if self._streams is not None else None
        latencies = self._latencies(now)
        found: list[EndpointLook] = []
        yield
        for number, (e, pool) in enumerate(zip(endpoints, pools, strict=True), 1):
            if e.slot >= rows or int(copy.generation[e.slot]) != e.generation:
                continue
            updated_at = float(copy.updated_at[e.slot])
            name = self._pool_name(pool)
            key = (e.name, e.namespace, str(e.port), *([name] if name is not None else ()))
            entries = counted.by_owner[e.owner] if e.owner < len(counted.by_owner) else 0
            found.append(
                EndpointLook(
                    name=e.name,
                    namespace=e.namespace,
                    address=e.address,
                    state=int(copy.state[e.slot]),
                    flags=int(copy.flags[e.slot]),
                    age_s=now - updated_at if updated_at else None,
                    scraped=self._scraped(copy, e.slot),
                    inflight_requests=requests[e.slot],
                    inflight_tokens=tokens[e.slot],
                    index_entries=round(entries * counted.factor),
                    picks=None if picks is None else picks[key],
                    cached=compared.get(key),
                    stream=None if streams is None else streams.get(e.slot, NOT_FOLLOWED),
                    first_token=latencies.get((e.slot, e.generation)),
                    pool=name,
                )
            )
            if number % ENDPOINTS_AT_ONCE == 0:
                yield
        return found

    def _latencies(self, now: float) -> Mapping[tuple[int, int], str]:
        """Returns (slot, generation) -> the learned time to the first token in words."""
        words: dict[tuple[int, int], str] = {}
        for pool in range(max(1, len(self.pools())) if self._latency is not None else 0):
            assert self._latency is not None
            found = self._latency.read(pool)
            if found is None:
                continue
            with contextlib.suppress(UnusableModel):
                model = decode(found[1])
                known = (each for each in model.endpoints.values() if each.samples)
                words |= {(each.slot, each.generation): in_words(model, each.slot, now) for each in known}
        return words

    def _pool_name(self, pool: int) -> str | None:
        """Returns the name of a pool, or None if the picker has one pool."""
        names = self.pools()
        return None if not names else names[pool] if pool < len(names) else ""

    def known(self) -> Sequence[Endpoint]:
        """Returns the endpoints that discovery knows at present."""
        try:
            return self._endpoints.current()
        except msgspec.MsgspecError as failure:
            raise SegmentError(f"the endpoints of {self.seen.name} cannot be read ({failure}): it runs another version") from failure

    def pools_of_known(self) -> list[str | None]:
        """Returns the name of the pool of each of these endpoints; None if the picker has one pool."""
        return [self._pool_name(pool) for pool in self._endpoints.pools()]

    def _scraped(self, copy: TableCopy, slot: int) -> Mapping[str, float]:
        present = int(copy.present[slot])
        columns = enumerate(self.table.schema.columns)
        return {name: float(copy.column(index)[slot]) for index, name in columns if present >> index & 1}

    def _picks(self) -> Counter[PickKey] | None:
        """Returns the number of decisions per endpoint so far, or None if the picker has no such series.

        Endpoints for which the series have no room are missing.
        """
        if self._attempts is None:
            return None
        known = self._attempts.schema.labels
        places = [known.index(label) for label in ("endpoint_name", "namespace", "port", POOL) if label in known]
        counter = list(self._attempts.schema.counter_at).index(SCHEDULER_ATTEMPTS.name)
        found: Counter[PickKey] = Counter()
        for labels, values in self._attempts.rows().items():
            found[tuple(labels[place] for place in places)] += values.counters[counter]
        return found

    def _configurations(self) -> list[Configuration | None]:
        """Returns the configuration in force of each of several pools, or None for a place without a pool."""
        return [self._configuration(pool) if name else None for pool, name in enumerate(self.pools())]

    def _configuration(self, pool: int | None = None) -> Configuration | None:
        """Returns the configuration in force of a pool, or of the only pool. Returns None without a configuration."""
        status = reload_status.read(self._status, pool or 0) if self._status is not None else None
        if status is None or not status.generation:
            return None
        used = self.areas.scalars(gauge_of_pool(GENERATION, pool))
        workers = sum(number == status.generation and self.areas.serving(ordinal) for ordinal, number in enumerate(used) if ordinal)
        failed = "" if status.successful else status.text
        return Configuration(
            generation=status.generation, hash=status.hash, workers=workers, last_reload_failed=failed, tryout=tryout_figures(status.tryout)
        )

    def _left_out(self) -> Mapping[str, int]:
        """Returns disabled plugin -> number of workers that have disabled it."""
        if self._isolation is None:
            return {}
        rows = self._isolation.rows().items()
        return {_plugin(labels): values.gauges[0] for labels, values in rows if values.gauges[0]}

    def _others(self, now: float) -> Others | None:
        """Returns the requests of other replicas, or None without a replica store."""
        if not self._remotes:
            return None
        area = self._remotes[0]
        return Others(
            replicas=area.replicas,
            requests=int(area.requests.sum()),
            tokens=int(area.tokens.sum()),
            waiting=sum(each.waiting()[0] for each in self._remotes),
            age_s=area.age(now),
        )

    def _bands(self, now: float) -> list[BandLook] | None:
        flow = self.flow
        if flow is None:
            return None
        self._objectives.look()
        cells = [(priority, flow.band(place)) for priority, place in self._objectives.content.places.items()]
        if not cells:  # flow control is off
            return None
        return [
            BandLook(
                priority=priority,
                requests=cell.requests,
                bytes=cell.bytes,
                oldest_age_s=max(0.0, now - cell.oldest) if cell.oldest else None,
            )
            for priority, cell in cells
        ]


def _plugin(labels: Sequence[str]) -> str:
    """Returns the name of a plugin, with the name of its pool if the picker has several pools."""
    return labels[0] if len(labels) == len(ISOLATION.labels) else f"{labels[0]} of pool {labels[-1]}"
