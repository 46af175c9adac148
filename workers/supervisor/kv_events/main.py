"""The kv-events process: one loop without asyncio, because ZeroMQ waits for its sockets by itself.

    sockets ─▶ Followed ─▶ Stream ─▶ Holder ─▶ index, links         positions, streams document ─▶ workers
    workers ─▶ bus: blocks that an endpoint will hold soon ─▶ index, for a short time (`speculation`)

In each turn, the loop reads the received messages, up to a limit per socket, and writes index, positions and document once. So a publisher
that sends without end delays the others by one turn at most. The process ends after the workers, or when it cannot continue. In the second
case the parent starts a successor, which continues with the same shared memory.
"""

import contextlib
import math
import resource
import time
from collections.abc import Container, Iterable, Mapping
from typing import Any

import structlog
import zmq

from epp.candidates import Endpoint
from epp.plugins.producers._precise_params import Settings
from epp.prefix.kv_events import NAME_CHARS_MAX, is_read, topic_parts
from shm.prefix_writer import OwnersExhausted
from workers.host.exit_codes import ExitCode
from workers.host.memory import MemoryUsage, cgroup_limit, share
from workers.process.instance import Instance
from workers.process.kv_memory import KvCounts
from workers.process.restart import kv_events_ordinal
from workers.shared.documents import Identity
from workers.supervisor.kv_events.costs import MEMORY_MAX, Costs
from workers.supervisor.kv_events.followed import Followed, addresses
from workers.supervisor.kv_events.held_state import KEEP_S, HeldState, SavedStream, Trailer
from workers.supervisor.kv_events.holdings import Holdings
from workers.supervisor.kv_events.publishing import Publishing
from workers.supervisor.kv_events.sockets import Subscription, context_for
from workers.supervisor.kv_events.speculation import Speculation
from workers.supervisor.kv_events.wanted import Key, WantedEndpoint, WantedEndpoints

WAIT_MS = 50
# The least time between the starts of two turns, so that a turn finds several messages. An empty turn costs 0.3 ms for 100 endpoints.
BATCH_S = 0.01
TICK_S = 0.05
AGE_TICKS = 16  # ticks of the index's clock per second
SWEEP_SHARE = 1 / 256
REPORTED_TOPICS_MAX = 64
AGAIN_S = 5.0  # the time after which endpoints that could not be followed are tried again

log = structlog.get_logger()


def run(instance: Instance) -> int:
    """Runs the process until parent and workers are gone. Returns the exit code."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # ZeroMQ takes several descriptors per endpoint
    try:
        follower = Follower(instance)
    except zmq.ZMQError as refused:
        bind = instance.layout.kv_settings.bind if instance.layout.kv_settings else ""
        instance.reports.failed(kv_events_ordinal(instance.layout.ordinals), f"kvEventsConfig.zmqEndpoint {bind}: {refused}")
        return ExitCode.BOOT_FAILED
    instance.reports.ready(kv_events_ordinal(instance.layout.ordinals))
    while not follower.over:
        follower.turn(time.monotonic())
        instance.reports.send_again()
    follower.close()
    return follower.exit_code


class Follower:
    """Follows the events of all endpoints. `turn` is one round of its loop."""

    def __init__(self, instance: Instance) -> None:
        settings, memory = instance.layout.kv_settings, instance.memory.kv_events
        assert settings is not None
        assert memory is not None
        self.settings = settings
        self.over = False
        self.exit_code = ExitCode.OK
        self.positions = memory.positions
        self.context = context_for(instance.options.max_endpoints)
        writer = memory.writer()
        self.publishing = Publishing(memory, self.positions)
        self.predecessors = self.publishing.predecessors()  # streams of a predecessor that are not followed yet
        if self.positions.applying:
            log.warning("kv-events: the predecessor ended in the middle of an update; the index of held blocks starts empty")
            writer.empty()
            self.predecessors = {}
        self.holdings = Holdings(writer, settings.tiers, instance.credentials.prefix_seed)
        self.holdings.known_words |= self.publishing.adapters
        self.holdings.progress = lambda: self.positions.heartbeat(time.monotonic())
        known = {owner for kept in self.predecessors.values() for owner in kept.owners}
        self._retire(owner for owner in writer.owners() if owner not in known)
        self._words = instance.words
        self.state = _state(instance, self.holdings)
        self.restored: dict[Identity, SavedStream] = {}  # streams of the snapshot with endpoints that have not come back yet
        self._keep_until = math.inf
        if self.state is not None and not self.predecessors and not writer.owners() and not writer.links.size:
            self._restore(self.state, time.monotonic())
        self.costs = Costs(_memory_limit(instance), MemoryUsage().over)
        self._left = KvCounts(evictions=-writer.evictions)  # the counts of streams that have ended
        self._active: set[Followed] = set()  # the endpoints with messages in this turn
        self.followed: dict[Key, Followed] = {}
        self.by_pod: dict[str, list[Followed]] = {}  # a server may be an endpoint of several pools
        self.reported_topics: set[bytes] = set()
        self.unknown_topics = 0
        self.speculation = Speculation(self.holdings, settings.speculative_s, instance.pipes.kv_bus_readers)
        self._published = WantedEndpoints(instance)
        self._wanted: Mapping[Key, WantedEndpoint] = {}
        self._refused: set[Key] = set()  # endpoints that could not be followed
        self._again_at = math.inf  # the time at which the endpoints in `_refused` are tried again
        self._ended = instance.pipes.workers_pipe.reader
        self._poller = zmq.Poller()
        self._poller.register(self._ended, zmq.POLLIN)
        self._busy = False
        self._ticked = 0.0
        self.bound: Subscription | None = None
        if settings.bind:
            self.bound = Subscription(self.context, settings.bind, bind=True)
            self._poll(self.bound)
        for descriptor in instance.pipes.kv_bus_readers:
            self._poller.register(descriptor, zmq.POLLIN)

    def turn(self, now: float) -> None:
        """Waits for messages, and handles the received messages. `now`: monotonic seconds."""
        self.positions.heartbeat(now)
        ready = dict(self._poller.poll(0 if self._busy else WAIT_MS))
        if self._ended in ready:
            self.over = True
            return
        now = time.monotonic()
        self.follow(now)
        self.positions.applying = True
        self._busy = self._receive(now, ready)
        self.speculation.receive(now)
        if ticks := now - self._ticked >= TICK_S:
            self._ticked = now
            self._tick(now)
        self.holdings.flush(int(now * AGE_TICKS))
        for followed in self._active:
            followed.publish()
        self.positions.applying = False
        if ticks or self.holdings.owners_changed:
            self.holdings.owners_changed = False
            others = self._left.plus(KvCounts(messages=self.unknown_topics, dropped=self.unknown_topics))
            self.publishing.publish(list(self.followed.values()), self.holdings, others, now)
        self.holdings.writer.sweep_both(SWEEP_SHARE)
        if ticks and self.state is not None:
            self.state.look(now, self._words.stopping, self._trailer)
        if self.costs.too_much(now):
            self.over, self.exit_code = True, ExitCode.FAULT
        if (ready or self._busy) and (left := now + BATCH_S - time.monotonic()) > 0:
            time.sleep(left)

    def follow(self, now: float) -> None:
        """Follows the endpoints that the supervisor has published. After AGAIN_S, tries again to follow the endpoints that failed."""
        if now >= self._keep_until:
            self._forget_restored()
        if not self._published.changed() and now < self._again_at:
            return
        wanted = self._wanted = self._published.read()
        if wanted and self.restored:
            self._keep_until = min(self._keep_until, now + KEEP_S)
        for identity in [identity for identity in self.followed if identity not in wanted]:
            self._leave(self.followed.pop(identity))
        self._refused &= wanted.keys()
        self._again_at = math.inf
        for identity in wanted:
            if identity not in self.followed:
                self._try(identity, now)
        if self._published.version > 0 and self.predecessors:
            self._drop(self.predecessors)
        self.by_pod = {}
        for followed in self.followed.values():
            for pod in {followed.endpoint.address, followed.endpoint.name}:
                self.by_pod.setdefault(pod, []).append(followed)
        self.speculation.know({f.endpoint.owner: f.holder for f in self.followed.values()})

    def close(self) -> None:
        """Saves the last snapshot, and closes all sockets. Leaves the shared memory as it is, for a successor."""
        if self.state is not None and self.exit_code == ExitCode.OK:
            self.state.close(self._trailer)
        self.context.destroy(0)

    def _try(self, identity: Key, now: float) -> None:
        endpoint, settings, name = self._wanted[identity]
        try:
            self.followed[identity] = self._begin(endpoint, self._kept(identity), settings)
        except (zmq.ZMQError, OwnersExhausted, ValueError) as problem:
            self._again_at = now + AGAIN_S
            if identity not in self._refused:
                self._refused.add(identity)
                log.warning(
                    "kv-events: cannot follow an endpoint; it is matched approximately. "
                    "Its event port must be at most 65535, and ulimit -n must allow 8 files per endpoint",
                    endpoint=endpoint.name,
                    problem=str(problem),
                )
            return
        self.predecessors.pop(identity, None)
        self.restored.pop(name, None)
        self._refused.discard(identity)

    def _kept(self, identity: Key) -> SavedStream | None:
        """Returns the state of an endpoint from a predecessor or the snapshot, or None."""
        return self.predecessors.get(identity) or self.restored.get(self._wanted[identity].name)

    def _restore(self, state: HeldState, now: float) -> None:
        """Fills the index from the snapshot, if there is a usable one."""
        loaded = state.load()
        if loaded is None:
            return
        self.positions.applying = True  # if this process is killed here, its successor must start from empty memory
        self.holdings.restore([kept.owners for kept in loaded.streams.values()], loaded.links, int(now * AGE_TICKS))
        self.holdings.known_words |= set(loaded.adapters)
        self.restored = dict(loaded.streams)
        self.positions.applying = False

    def _trailer(self) -> Trailer:
        """Returns the part of the snapshot after the links."""
        kept = dict(self.restored)
        kept |= {self._wanted[identity].name: followed.kept() for identity, followed in self.followed.items()}
        streams = [(identity, each) for identity, each in kept.items() if each.position]
        return Trailer(0.0, [], sorted(self.holdings.known_words), streams)

    def _begin(self, endpoint: Endpoint, kept: SavedStream | None, settings: Settings) -> Followed:
        """Starts to follow an endpoint. Raises ZMQError, OwnersExhausted, and ValueError for a port above 65535."""
        subscription, replay = None, ""
        if self.bound is None:
            address, replay = addresses(endpoint, settings.port, settings.replay_port)
            subscription = Subscription(self.context, address)
        try:
            followed = Followed(
                endpoint,
                self.holdings,
                self.positions,
                self.context,
                subscription=subscription,
                topic=settings.topic,
                replay_address=replay,
                kept=kept,
            )
        except OwnersExhausted:
            if subscription is not None:
                subscription.close()
            raise
        if subscription is not None:
            self._poll(subscription)
        log.info("kv-events: follows an endpoint", endpoint=endpoint.name, address=subscription.address if subscription else "bound")
        return followed

    def _subscribe_again(self, followed: Followed, before: Subscription) -> None:
        """Replaces a subscription that was given up. If no socket is left, the next turn tries again."""
        with contextlib.suppress(zmq.ZMQError):
            successor = Subscription(self.context, before.address)
            followed.follow_again(successor)
            self._stop_polling(before)
            before.close()
            self._poll(successor)

    def _leave(self, followed: Followed) -> None:
        if followed.subscription is not None:
            self._stop_polling(followed.subscription)
        self._left = self._left.plus(followed.counts())
        followed.close()
        log.info("kv-events: an endpoint has left", endpoint=followed.endpoint.name)

    def _poll(self, subscription: Subscription) -> None:
        self._poller.register(subscription.socket, zmq.POLLIN)
        self._poller.register(subscription.monitor, zmq.POLLIN)

    def _stop_polling(self, subscription: Subscription) -> None:
        self._poller.unregister(subscription.socket)
        self._poller.unregister(subscription.monitor)

    def _receive(self, now: float, ready: Container[object]) -> bool:
        busy, self._active = False, set[Followed]()
        for followed in self.followed.values():
            if followed.receive(now, ready):
                busy = True
                self._active.add(followed)
                self.positions.heartbeat(time.monotonic())  # a turn is long if many endpoints send at once
            if self.holdings.crowded:
                self.holdings.flush(int(now * AGE_TICKS))
        if self.bound is not None:
            busy |= self._receive_bound(self.bound, now)
        return busy

    def _receive_bound(self, bound: Subscription, now: float) -> bool:
        """Gives each message to the endpoint that its topic names. A lost connection may be that of any endpoint, so all endpoints are
        treated as having lost it.
        """
        busy = False
        for opened in bound.changes():
            if not opened:
                for followed in self.followed.values():
                    if followed.stream.is_open:
                        followed.losses += 1
                        followed.stream.lost(now)
                        followed.stream.opened(now)
        beginning = self.settings.topic.encode()
        for topic, number, payload in bound.messages():
            busy = True
            pod, _ = topic_parts(topic)
            found = self.by_pod.get(pod, ()) if is_read(topic, beginning) else ()
            if not found:
                self.unknown_topics += 1
                self._report_unknown(topic[:NAME_CHARS_MAX])
                continue
            for known in found:
                if not known.stream.is_open:
                    known.stream.opened(now)
                known.take(number, payload, now)
                self._active.add(known)
        return busy

    def _report_unknown(self, topic: bytes) -> None:
        if topic not in self.reported_topics and len(self.reported_topics) < REPORTED_TOPICS_MAX:
            self.reported_topics.add(topic)
            log.warning(
                "kv-events: a topic names no endpoint of the pool, or does not begin with topicFilter; its messages are dropped",
                topic=topic.decode("utf-8", "replace"),
            )

    def _tick(self, now: float) -> None:
        for followed in self.followed.values():
            followed.stream.tick(now)
            if followed.other_topic:
                self._report_unknown(followed.other_topic)
            if (before := followed.given_up(now)) is not None:
                self._subscribe_again(followed, before)
            if followed.stream.replays_failed and not followed.replay_failure_told:
                followed.replay_failure_told = True
                log.warning(
                    "kv-events: a replay has no answer or no end; the endpoint is matched approximately, and later from live events",
                    endpoint=followed.endpoint.name,
                )
        self.speculation.expire(now)
        self.costs.report(list(self.followed.values()), now)

    def _forget_restored(self) -> None:
        """Drops the blocks of endpoints of the snapshot that have not come back."""
        self._keep_until = math.inf
        if self.restored:
            log.info("kv-events: endpoints of the snapshot have not come back", count=len(self.restored))
        self._drop(self.restored)

    def _drop(self, streams: dict[Any, SavedStream]) -> None:
        """Drops the blocks of endpoints that have not come back."""
        self._retire(owner for kept in streams.values() for owner in kept.owners)
        streams.clear()

    def _retire(self, owners: Iterable[int]) -> None:
        for owner in owners:
            self.holdings.writer.retire(owner)


def _state(instance: Instance, holdings: Holdings) -> HeldState | None:
    """Creates the object that keeps the snapshot in --state-dir; None without that option."""
    folder = instance.options.state_dir
    if not folder:
        return None
    tiers = [name for name, _ in holdings.tiers]
    return HeldState(folder, holdings.writer, tiers, seed=instance.credentials.prefix_seed)


def _memory_limit(instance: Instance) -> int:
    """Returns the number of bytes that this process may use, its shared memory included."""
    options, memory = instance.options, instance.layout.kv_events
    assert memory is not None
    own = share(options.worker_memory_limit, cgroup_limit(), options.workers) or MEMORY_MAX
    return own + sum(part.bytes for part in memory.parts.values())
