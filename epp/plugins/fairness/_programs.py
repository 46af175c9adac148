"""Keeps the programs that a `thunder-agent` follows, and how many tokens they hold in the KV cache of each endpoint.

A *program* is one run of an agent: all requests with the same fairness id. A *turn* is one of these requests. Each turn sends the whole
history again. So a program holds the tokens that its last answer reported in total, or those that its running request probably has: the
larger number, not the sum. While a program has no request in flight, its tokens halve every half-life, because the engine evicts its
blocks.

Names, formulas and defaults are those of the reference picker. Each endpoint has a sum of its programs' tokens, which is updated with
each turn. So reading the sum costs the same for ten programs and for ten thousand. This is possible because the tokens of all idle programs
fade at the same rate, so their sum fades at this rate, too.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice
from typing import Final, NamedTuple, Protocol

from epp.candidates import Endpoint
from epp.request.flows import FlowKey

REASONING, RESUMING, NEW = range(3)  # classes of programs; the smallest goes first
CLASSES: Final = ("reasoning", "resuming", "new")
BYTES_PER_TOKEN: Final = 4.0  # bytes of a request's body per token, before any answer reported tokens
BYTES_PER_TOKEN_RANGE: Final = (1.0, 64.0)
MOMENTUM: Final = 0.8
RESERVED_S: Final = 5.0  # room that is kept for a request becomes free if the request gets no endpoint in this time
PROGRAMS_MAX: Final = 20_000
SWEPT_MAX: Final = 4_096  # programs that one sweep looks at; a sweep runs between requests
TRIED_MAX: Final = 8  # when there are too many programs, this many are checked for one that can be removed

PodKey = tuple[int, int]  # slot and generation of an endpoint


class Waiters(Protocol):
    """The listener that learns of changes of a program with requests that wait in its band."""

    def reclassed(self, key: FlowKey) -> None:
        """Notes that the class or the size of the program may have changed."""


class Pod:
    """Counts the tokens that programs hold at an endpoint. `capacity`: the size of its KV cache in tokens; 0 if it has no room.

    `running`: the tokens of programs with requests in flight. `_idle`: the tokens of the other programs, at the time `_idle_at`.
    `reserved`: tokens for which room is kept (`Reservation`).
    """

    __slots__ = ("_idle", "_idle_at", "capacity", "key", "label", "owner", "programs", "reserved", "running")

    def __init__(self, endpoint: Endpoint) -> None:
        self.key: PodKey = (endpoint.slot, endpoint.generation)
        self.owner = endpoint.owner
        self.label = f"{endpoint.namespace}/{endpoint.name}"
        self.capacity = 0.0
        self.running = 0.0
        self._idle = 0.0
        self._idle_at = 0.0
        self.programs: dict[str, Program] = {}
        self.reserved = 0.0

    def load(self, now: float, half_life_s: float) -> float:
        """Returns how many tokens the programs of this endpoint hold."""
        return self.running + self._idle * faded(now - self._idle_at, half_life_s)

    def add_idle(self, tokens: float, now: float, half_life_s: float) -> None:
        """Adds tokens of an idle program. A negative number takes tokens away."""
        self._idle = max(0.0, self._idle * faded(now - self._idle_at, half_life_s) + tokens)
        self._idle_at = max(self._idle_at, now)

    def settle(self) -> None:
        """Sets the sums to 0 if the endpoint has no program, because rounding may have left a small rest."""
        if not self.programs:
            self.running = self._idle = 0.0


class Program:
    """Holds a program's state. `turns`: how many requests were sent. `in_flight`: how many of these requests run now.

    `in_flight_tokens`: the estimated tokens of the running requests.

    `committed`: the tokens that the last answer reported. `answered_at`: when the last request ended. `last`: when the program was last
    active. `pod`: the endpoint at which the program holds room; None if it never had room, or lost it. `final`: whether the client has
    announced the last turn. `bands`: the bands in which the program has waiting requests.
    """

    __slots__ = ("answered_at", "bands", "committed", "final", "in_flight", "in_flight_tokens", "last", "pod", "turns")

    def __init__(self, now: float) -> None:
        self.pod: Pod | None = None
        self.turns = 0
        self.in_flight = 0
        self.in_flight_tokens = 0
        self.committed = 0
        self.answered_at: float | None = None
        self.last = now
        self.final = False
        self.bands: dict[Waiters, FlowKey] = {}

    def tokens(self, now: float, half_life_s: float) -> float:
        """Returns how many tokens the program holds."""
        if self.in_flight or self.answered_at is None:
            return float(max(self.committed, self.in_flight_tokens))
        return self.committed * faded(now - self.answered_at, half_life_s)


class Reservation(NamedTuple):
    """Describes room that is kept for a program from the turn of a request until the request is sent. `at`: when the turn began."""

    pod: Pod
    tokens: float
    at: float


class Programs:
    """Holds all programs of a picker, and the endpoints of the picker. Times are monotonic seconds."""

    def __init__(self, half_life_s: float, ttl_s: float) -> None:
        self._half_life_s = half_life_s
        self._ttl_s = ttl_s
        self._programs: OrderedDict[str, Program] = OrderedDict()  # the least recently used program first
        self._reserved: OrderedDict[str, Reservation] = OrderedDict()  # the oldest reservation first
        self.pods: dict[PodKey, Pod] = {}
        self.bytes_per_token = BYTES_PER_TOKEN
        self.now = 0.0

    def __len__(self) -> int:
        return len(self._programs)

    # Endpoints.

    def pod(self, endpoint: Endpoint) -> Pod:
        """Returns the pod of an endpoint."""
        key = (endpoint.slot, endpoint.generation)
        pod = self.pods.get(key)
        if pod is None:
            pod = self.pods[key] = Pod(endpoint)
        return pod

    def keep_pods(self, kept: Mapping[PodKey, object]) -> list[Pod]:
        """Forgets and returns the endpoints that are not in `kept`. The programs of these endpoints stay bound until a turn goes to another
        endpoint.
        """
        gone = [pod for key, pod in self.pods.items() if key not in kept]
        for pod in gone:
            del self.pods[pod.key]
        return gone

    def load(self, pod: Pod, now: float) -> float:
        """Returns how many tokens the programs at this endpoint hold."""
        return pod.load(now, self._half_life_s)

    # Programs.

    def program(self, fairness_id: str, now: float) -> Program:
        """Returns the program with this id. Creates the program if the id is new."""
        self.now = max(self.now, now)
        programs = self._programs
        program = programs.get(fairness_id)
        if program is None:
            program = programs[fairness_id] = Program(now)
            if len(programs) > PROGRAMS_MAX:
                self._make_room()
        else:
            programs.move_to_end(fairness_id)
        return program

    def find(self, fairness_id: str) -> Program | None:
        return self._programs.get(fairness_id)

    def bound(self) -> int:
        """Returns how many programs hold room at an endpoint."""
        return sum(program.pod is not None for program in self._programs.values())

    def class_of(self, program: Program) -> int:
        """Returns the class of a program: REASONING if it holds room, RESUMING if it lost its room, NEW if it never had room."""
        if not program.turns:
            return NEW
        return RESUMING if program.pod is None else REASONING

    def tokens(self, program: Program, now: float) -> float:
        """Returns how many tokens a program holds."""
        return program.tokens(now, self._half_life_s)

    def estimate(self, size: int) -> int:
        """Estimates the tokens of a body of `size` bytes."""
        return int(max(0, size) / self.bytes_per_token)

    def begin(self, fairness_id: str, pod: Pod, estimate: int, now: float, *, final: bool) -> bool:
        """Records that a turn is sent to a pod. Returns whether the program held room at another pod before. `estimate`: in tokens.

        `final`: whether the client announced this turn as the last one.
        """
        program = self.program(fairness_id, now)
        self.release(fairness_id)
        before = program.pod
        self._withdraw(fairness_id, program, now)
        program.pod = pod
        program.in_flight += 1
        program.in_flight_tokens += estimate
        program.turns += 1
        program.last = now
        program.final = program.final or final
        self._deposit(fairness_id, program, now)
        self._tell(program)
        return before is not None and before is not pod

    def end(self, fairness_id: str, estimate: int, reported: int, now: float, *, answered: bool) -> bool:
        """Records that a turn has ended. Returns whether the program has ended with this turn.

        `estimate`: as for `begin`. `reported`: the tokens that the answer reported. If this is 0 and there was an answer (`answered`), the
        estimate is used instead.
        """
        self.now = max(self.now, now)
        program = self._programs.get(fairness_id)
        if program is None:
            return False
        self._withdraw(fairness_id, program, now)
        program.in_flight = max(0, program.in_flight - 1)
        program.in_flight_tokens = max(0, program.in_flight_tokens - estimate) if program.in_flight else 0
        if reported > 0:
            program.committed = reported
        elif answered:
            program.committed = max(program.committed, estimate)
        program.answered_at = program.last = now
        if program.final and not program.in_flight:
            self._forget(fairness_id, program)
            return True
        self._deposit(fairness_id, program, now)
        self._tell(program)
        return False

    def refine(self, size: int, prompt_tokens: int) -> None:
        """Learns the bytes per token from an answer that reported the tokens of its prompt."""
        if size > 0 and prompt_tokens > 0:
            mixed = MOMENTUM * self.bytes_per_token + (1 - MOMENTUM) * size / prompt_tokens
            least, most = BYTES_PER_TOKEN_RANGE
            self.bytes_per_token = min(max(mixed, least), most)

    def shed(self, pod: Pod, over: float, idle_s: float, each: float, now: float) -> int:
        """Takes room from idle programs of a pod, the smallest program first, until `over` tokens are free. Returns how many lost room.

        `idle_s`: how long a program must have been idle. `each`: how many tokens of room each of these programs frees besides those that it
        holds.
        """
        idle = [
            (self.tokens(program, now) + each, fairness_id, program)
            for fairness_id, program in pod.programs.items()
            if not program.in_flight and now - (program.last if program.answered_at is None else program.answered_at) >= idle_s
        ]
        count = 0
        for tokens, fairness_id, program in sorted(idle, key=lambda found: found[0]):
            if over <= 0.0:
                break
            self._withdraw(fairness_id, program, now)
            program.pod = None
            over -= tokens
            count += 1
            self._tell(program)
        return count

    def sweep(self) -> int:
        """Drops programs that, at the time of the last request, had been idle for longer than the TTL. Returns how many it dropped."""
        oldest, count = self.now - self._ttl_s, 0
        for fairness_id, program in list(islice(self._programs.items(), SWEPT_MAX)):
            if program.last < oldest and not program.in_flight and not program.bands:
                self._withdraw(fairness_id, program, self.now)
                del self._programs[fairness_id]
                count += 1
        return count

    # Reservations.

    def reserve(self, fairness_id: str, pod: Pod, tokens: float, now: float) -> None:
        """Keeps room for a program at a pod, until its request is sent or RESERVED_S have passed."""
        self.release(fairness_id)
        self._reserved[fairness_id] = Reservation(pod, tokens, now)
        pod.reserved += tokens

    def release(self, fairness_id: str) -> None:
        """Frees the room that is kept for a program, if any."""
        reservation = self._reserved.pop(fairness_id, None)
        if reservation is not None:
            pod = reservation.pod
            pod.reserved = max(0.0, pod.reserved - reservation.tokens)

    def reserved_for(self, fairness_id: str, now: float) -> Pod | None:
        """Returns the pod at which room is kept for a program, or None if no room is kept."""
        self.expire(now)
        reservation = self._reserved.get(fairness_id)
        return None if reservation is None else reservation.pod

    def expire(self, now: float) -> None:
        """Frees room that was kept for longer than RESERVED_S."""
        while self._reserved:
            fairness_id, oldest = next(iter(self._reserved.items()))
            if now - oldest.at <= RESERVED_S:
                return
            self.release(fairness_id)

    # Bookkeeping.

    def _withdraw(self, fairness_id: str, program: Program, now: float) -> None:
        """Takes a program's tokens out of the sums of its pod."""
        pod = program.pod
        if pod is None:
            return
        del pod.programs[fairness_id]
        self._count(pod, program, -1.0, now)
        pod.settle()

    def _deposit(self, fairness_id: str, program: Program, now: float) -> None:
        """Puts a program's tokens into the sums of its pod."""
        if program.pod is not None:
            program.pod.programs[fairness_id] = program
            self._count(program.pod, program, 1.0, now)

    def _count(self, pod: Pod, program: Program, sign: float, now: float) -> None:
        tokens = sign * self.tokens(program, now)
        if program.in_flight:
            pod.running = max(0.0, pod.running + tokens)
        else:
            pod.add_idle(tokens, now, self._half_life_s)

    def _forget(self, fairness_id: str, program: Program) -> None:
        """Drops a program that has ended and has no tokens in the sums. If the program has waiting requests, it begins anew."""
        if not program.bands:
            del self._programs[fairness_id]
            return
        anew = self._programs[fairness_id] = Program(program.last)
        anew.bands = program.bands
        self._tell(anew)

    def _tell(self, program: Program) -> None:
        for waiters, key in tuple(program.bands.items()):
            waiters.reclassed(key)

    def _make_room(self) -> None:
        """Drops the least recently used program without waiting or running requests.

        There are not many programs with such requests, because the numbers of requests and flows are limited.
        """
        for fairness_id, program in islice(self._programs.items(), TRIED_MAX):
            if not program.bands and not program.in_flight:
                self._withdraw(fairness_id, program, self.now)
                del self._programs[fairness_id]
                return


def faded(passed_s: float, half_life_s: float) -> float:
    """Returns the share of a program's tokens that is left after `passed_s` seconds, from 0 to 1; always 1 if the half-life is 0."""
    return math.exp2(-passed_s / half_life_s) if half_life_s > 0.0 and passed_s > 0.0 else 1.0
