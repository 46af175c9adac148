"""Limits the share of a process's time that a port may use, accepts its connections, and orders its work.

The supervisor also scrapes and sends heartbeats, so clients of the metrics port must not keep its event loop busy. All work for them is
divided into short acts. `Turns` runs one act per turn of the loop, measures its CPU time, and adds ACT_COST_S. A `Share` is a bucket of
seconds that fills with a fraction of the time. While it is empty, the acts wait, and the process does its other work. No client is charged
for time in which the process was frozen or waited for a core.

    urgent acts     new connections and probes; they have their own share, and become prompt acts when it is used up
    prompt acts     heads of requests, and short answers; hosts take turns, so that a client waits for one act of each other host
    patient acts    pieces of long pages: one after every four prompt acts

The caller limits the number of waiting acts: a connection and a page have at most one each. While the port uses up its share, `Turns`
names the host whose prompt acts took most of it, once per second.
"""

import asyncio
import errno
import itertools
import socket
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

SHARE: Final = 1 / 4  # the share of the process's time that all pages together may take
URGENT_SHARE: Final = 1 / 20  # the share of urgent acts: some 50 probes per second
BURST_S: Final = 0.05
PERIOD_S: Final = 1.0  # how often to check whether a host takes too much
USED_UP: Final = 0.8  # the part of the share above which it is treated as used up
MOST: Final = 0.5  # the part of the used time above which one host took most of it
ACT_COST_S: Final = 0.0001  # the cost of an act outside of it: the loop wakes up, reads, opens and closes connections
PROMPT_IN_A_ROW: Final = 4
ACCEPTS_AT_ONCE: Final = 4
ACCEPT_SHARE: Final = 0.1  # the share of the process's time that accepting may take
ACCEPT_BURST_S: Final = 0.02
NO_DESCRIPTORS_PAUSE_S: Final = 0.1

T = TypeVar("T")
Act = Callable[[], None]


class Share:
    """A bucket of seconds: it fills with `fraction` seconds per second up to `burst_s`, and work empties it."""

    __slots__ = ("_burst_s", "_clock", "_fraction", "_left_s", "_seen_at")

    def __init__(self, fraction: float, burst_s: float, clock: Callable[[], float]) -> None:
        self._fraction = fraction
        self._burst_s = burst_s
        self._clock = clock
        self._left_s = burst_s
        self._seen_at = clock()

    def spend(self, seconds: float) -> None:
        """Takes the CPU seconds of an act out of the bucket."""
        self._left_s -= seconds

    def wait_s(self) -> float:
        """Returns the seconds until the next act may run."""
        now = self._clock()
        self._left_s = min(self._burst_s, self._left_s + (now - self._seen_at) * self._fraction)
        self._seen_at = now
        return 0.0 if self._left_s > 0 else (0.001 - self._left_s) / self._fraction


class HostQueues(Generic[T]):
    """Holds waiting items by host. Hosts take turns."""

    def __init__(self) -> None:
        self._hosts: dict[str, deque[T]] = {}  # the next host in turn first

    def __len__(self) -> int:
        return sum(map(len, self._hosts.values()))

    def __bool__(self) -> bool:
        return bool(self._hosts)

    def add(self, host: str, one: T) -> None:
        """Adds an item at the end of its host's queue."""
        self._hosts.setdefault(host, deque()).append(one)

    def take(self, host: str | None = None) -> tuple[str, T]:
        """Removes and returns the first item of a host, with the host. `host`: None means the next host in turn; a host that is named keeps
        its place in the turns. There must be an item.
        """
        turn = next(iter(self._hosts)) if host is None else host
        queue = self._hosts[turn]
        one = queue.popleft()
        if host is None or not queue:
            del self._hosts[turn]
        if host is None and queue:
            self._hosts[turn] = queue  # behind the other hosts
        return turn, one

    def counts(self) -> Counter[str]:
        """Returns the number of waiting items of each host."""
        return Counter({host: len(queue) for host, queue in self._hosts.items()})

    def clear(self) -> list[T]:
        """Removes and returns all items."""
        left = list(itertools.chain.from_iterable(self._hosts.values()))
        self._hosts.clear()
        return left


class Turns:
    """Runs acts one by one, within a share of the time."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.perf_counter,
        on_used_up: Callable[[str], None] = lambda host: None,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        """`on_used_up(host)` is called when a period has used up its share; `host` took most of it. `cpu`: CPU seconds of this thread."""
        self._loop = loop
        self._clock = clock
        self._cpu = cpu
        self._on_used_up = on_used_up
        # By host, the seconds of its prompt acts in this period.
        self._took: defaultdict[str, float] = defaultdict(float)
        self._used_s = 0.0  # seconds of all acts in this period, without urgent ones
        self._period_ends = clock() + PERIOD_S
        self.share = Share(SHARE, BURST_S, clock)
        self._urgent_share = self._charged = Share(URGENT_SHARE, BURST_S, clock)
        self._urgent: deque[Act] = deque()
        self._soon = False  # whether the next turn begins at once
        self._prompt: HostQueues[Act] = HostQueues()
        self._patient: deque[Act] = deque()
        self._in_a_row = 0
        self._timer: Any = None  # starts the next turn

    def urgent(self, act: Act, host: str = "") -> None:
        """Queues a short act that must not wait because of pages or other clients: it runs next, while its share lasts."""
        if self._urgent_share.wait_s():
            self.prompt(act, host)
        else:
            self._urgent.append(act)
            self._schedule()

    def charge(self, seconds: float) -> None:
        """Charges CPU time that an act causes outside of it. The act itself calls this."""
        self._charged.spend(seconds)

    def prompt(self, act: Act, host: str = "") -> None:
        """Queues a short act for a client at this host. It runs soon."""
        self._prompt.add(host, act)
        self._schedule()

    def patient(self, act: Act) -> None:
        """Queues an act that may wait. Prompt acts may run before it."""
        self._patient.append(act)
        self._schedule()

    def close(self) -> None:
        """Drops all acts."""
        self._urgent.clear()
        self._prompt.clear()
        self._patient.clear()
        self._cancel()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self) -> None:
        if self._urgent and not self._soon:
            self._cancel()
        if self._timer is None and (self._urgent or self._prompt or self._patient):
            wait_s = 0.0 if self._urgent else self.share.wait_s()
            self._soon = not wait_s
            self._timer = self._loop.call_soon(self._turn) if self._soon else self._loop.call_later(wait_s, self._turn)

    def _turn(self) -> None:
        self._timer, self._soon = None, False
        urgent = bool(self._urgent)
        self._charged = self._urgent_share if urgent else self.share
        begun = self._cpu()
        host, act = ("", self._urgent.popleft()) if urgent else self._next()
        try:
            act()
        finally:
            seconds = self._cpu() - begun + ACT_COST_S
            self._charged.spend(seconds)
            if not urgent:
                self._account(host, seconds)
            self._schedule()

    def _account(self, host: str, seconds: float) -> None:
        """Adds an act to this period. At the end of the period, names the host that took most if the share was used up."""
        self._used_s += seconds
        if host:
            self._took[host] += seconds
        if (now := self._clock()) < self._period_ends:
            return
        elapsed = now - self._period_ends + PERIOD_S
        if self._took and self._used_s >= USED_UP * SHARE * elapsed:
            host = max(self._took, key=self._took.__getitem__)
            if self._took[host] >= MOST * self._used_s:  # otherwise pages took it, such as those of scrapers
                self._on_used_up(host)
        self._took.clear()
        self._used_s = 0.0
        self._period_ends = now + PERIOD_S

    def _next(self) -> tuple[str, Act]:
        """Returns the next act in turn, and the host of a prompt act, or ""."""
        if self._prompt and (not self._patient or self._in_a_row < PROMPT_IN_A_ROW):
            self._in_a_row += 1
            return self._prompt.take()
        self._in_a_row = 0
        return "", self._patient.popleft()


class Listener:
    """Accepts connections within a share of the time. Calls `take` with each accepted socket and its host."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listening: socket.socket,
        take: Callable[[socket.socket, str], None],
        report: Callable[..., None],
        clock: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        """`cpu`: CPU seconds of this thread."""
        self._loop = loop
        self._listening = listening
        self._take = take
        self._report = report
        self._cpu = cpu
        self._share = Share(ACCEPT_SHARE, ACCEPT_BURST_S, clock)
        self._timer: Any = None

    def open(self) -> None:
        """Begins to accept."""
        self._timer = None
        self._loop.add_reader(self._listening.fileno(), self._readable)

    def close(self) -> None:
        """Accepts no more. The socket stays open for the caller."""
        if self._timer is not None:
            self._timer.cancel()
        else:
            self._loop.remove_reader(self._listening.fileno())

    def _readable(self) -> None:
        begun = self._cpu()
        try:
            for _ in range(ACCEPTS_AT_ONCE):
                accepted, peer = self._listening.accept()
                accepted.setblocking(False)
                self._take(accepted, peer[0].removeprefix("::ffff:"))
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            pass
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            self._report("cannot accept a connection on the metrics port", reason=f"{error.strerror}; raise the limit of open files")
            self._pause(NO_DESCRIPTORS_PAUSE_S)
            return
        self._share.spend(self._cpu() - begun)
        if wait_s := self._share.wait_s():
            self._pause(wait_s)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listening.fileno())
        self._timer = self._loop.call_later(seconds, self.open)
