"""Admit agents by the KV cache that their whole run needs, not by that of single requests.

While an agent waits for a tool, its context is still in the prefix cache, but the engine reports the blocks as unused. So a cache may
be full although its reported usage is low. This policy counts the tokens of every program, that is, of all requests with one fairness id
(`_programs`). It gives the next turn to programs that already have room, and lets a new program in only if its first request fits an
endpoint (`_turns`).

A configuration names one instance in three places: as a scorer in the profile, as the saturation detector and as the fairness policy. The
fairness policy decides. The detector always reports an idle pool; its calls tell the instance which endpoints there are. All state is
in one worker.
"""

from typing import Annotated

import msgspec
import numpy as np

from epp.candidates import Candidates, Endpoint, EndpointList, Floats, Scores, Snapshot
from epp.data import CACHE_TOKENS, Datum
from epp.decision.decision import Decision, Response
from epp.metrics import counter, gauge
from epp.plugin import Count, FairnessPolicy, Gauge, PreRequest, Profile, ResponseComplete, SaturationDetector, Scorer, Services, plugin
from epp.plugins.fairness._programs import CLASSES, Pod, PodKey, Programs
from epp.plugins.fairness._turns import Turns
from epp.request import DEFAULT_FLOW, Request

UNKNOWN_STEP = 1e-12  # not 0: at 0, the gate lets requests through one at a time
SHED_EVERY_S = 0.1
SHOW_EVERY_S = 1.0
HELD_S = 1.0  # seconds; a request that waited for at least this long is treated as held back
CAPACITY_TOKENS = 4_194_304

HOLDS = counter("thunder_agent_holds_total", "Turns that had to wait for a second or more.", "class")
RELEASES = counter("thunder_agent_releases_total", "Turns of programs.", "class")
STARVED = counter("thunder_agent_starvation_promotions_total", "Turns that came because a request had waited for too long.")
REBINDS = counter("thunder_agent_rebinds_total", "Turns that moved a program to another endpoint.")
SHEDS = counter("thunder_agent_sheds_total", "Idle programs that lost their room at a full endpoint.")
FINALS = counter("thunder_agent_session_final_releases_total", "Programs that announced their last turn.")
EVICTIONS = counter("thunder_agent_ttl_evictions_total", "Programs that were idle for too long.")
PROGRAMS = gauge("thunder_agent_programs", "Programs with and without an endpoint.", "state")
UTILIZATION = gauge("thunder_agent_pod_utilization", "Tokens of programs, as a share of the KV cache.", "pod")
CAPACITY = gauge("thunder_agent_pod_capacity_tokens", "Size of the KV cache in tokens.", "pod", "source")

NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How much room there is, and which programs wait for it. Names and defaults are those of the reference picker.

    capacity_tokens: The size, in tokens, of the KV cache of an endpoint that reports none.
    require_real_capacity: An endpoint that does not report the size of its KV cache has no room.
    util_threshold: The share of the KV cache up to which programs are let in.
    acting_half_life_seconds: The time without a request after which the tokens of a program have half their weight. With 0, they keep their
    full weight for ever.
    buffer_tokens_per_program: Room that is kept for each program to grow.
    shed_idle_seconds: Above utilThreshold, programs that are idle for so long lose their room, the smallest first. With 0, no program loses
    its room.
    head_wait_starvation_ms: A request that has waited for so long goes, even if no endpoint has room for it. With 0, it keeps waiting.
    eviction_ttl_seconds: How long an inactive program is remembered.
    eviction_sweep_seconds: The time between two searches for inactive programs.
    session_final_header: The header that marks a program's last turn by the value `true` or `1`.
    parent_session_header: Accepted, without effect.
    profile_name: The profile that chooses a program's endpoint. Default: the primary profile.
    """

    capacity_tokens: Annotated[int, msgspec.Meta(gt=0)] = CAPACITY_TOKENS
    require_real_capacity: bool = False
    util_threshold: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    acting_half_life_seconds: NotNegative = 0.0
    buffer_tokens_per_program: Annotated[int, msgspec.Meta(ge=0)] = 100
    shed_idle_seconds: NotNegative = 0.0
    head_wait_starvation_ms: NotNegative = 30_000.0
    eviction_ttl_seconds: Positive = 3600.0
    eviction_sweep_seconds: Positive = 300.0
    session_final_header: str = "x-session-final"
    parent_session_header: str = "x-parent-session-id"
    profile_name: str = ""


class Turn:
    """Remembers a request that was sent: the fairness id of its program, and its estimated tokens."""

    __slots__ = ("estimate", "fairness_id")

    def __init__(self, fairness_id: str, estimate: int) -> None:
        self.fairness_id = fairness_id
        self.estimate = estimate


@plugin("thunder-agent")
class ThunderAgent(FairnessPolicy, SaturationDetector, Scorer, PreRequest, ResponseComplete):
    """Lets programs (fairness ids) in as far as the KV caches of the endpoints have room for them, and keeps each at its endpoint.

    A program holds the tokens of its last answer, or of its running request if that is more. The room of an endpoint is
    utilThreshold x size of its cache - tokens of its programs - bufferTokensPerProgram for each program. A request of a program that holds
    room always goes. A new program, or one that lost its room, waits until its tokens and the buffer fit an endpoint.

    As a scorer, it gives 1 to the program's endpoint and 0 to all others. For a program without an endpoint, an endpoint scores
    1 - tokens of its programs / size of its cache. Requests without a fairness id are not scored. As the saturation detector it always
    reports an idle pool.

    Name one instance as scorer, saturation detector and fairness policy. A picker with this plugin runs one worker.
    """

    Params = Parameters
    one_worker = True
    holds = True
    isolates = False
    consumes = (CACHE_TOKENS,)
    metrics = (HOLDS, RELEASES, STARVED, REBINDS, SHEDS, FINALS, EVICTIONS, PROGRAMS, UTILIZATION, CAPACITY)

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._final_header = params.session_final_header.strip().lower()
        if not self._final_header:
            raise ValueError("sessionFinalHeader: is empty; name a header, or omit it")
        self.reads_headers = (self._final_header,)
        self._starves_s = params.head_wait_starvation_ms / 1000.0
        self.programs = Programs(params.acting_half_life_seconds, params.eviction_ttl_seconds)
        self._turn = Datum(f"thunder_turn/{name}", Turn)
        self.keeps = (self._turn,)
        self._view: dict[PodKey, Pod] = {}  # the endpoints of the last snapshot
        self._snapshot: Snapshot | None = None
        self._endpoint_list: EndpointList | None = None
        self._stages: set[bytes] = set()  # the sets of rows of the snapshot that are in the view already
        self._sizes_of: Snapshot | None = None
        self._sizes: Floats = np.zeros(0)
        self._real = np.zeros(0, dtype=bool)
        self._shed_at = 0.0
        self._sources: dict[PodKey, bool] = {}  # whether an endpoint reports the size of its KV cache
        self._services: Services
        self._holds: Count
        self._releases: Count
        self._shown: tuple[Gauge, Gauge, Gauge]

    def start(self, services: Services) -> None:
        self._services = services
        self._holds, self._releases = services.count(self, HOLDS), services.count(self, RELEASES)
        self._shown = (services.gauge(self, PROGRAMS), services.gauge(self, UTILIZATION), services.gauge(self, CAPACITY))
        services.every(self.params.eviction_sweep_seconds, self._sweep)
        services.every(SHOW_EVERY_S, self._show)

    # The saturation detector: which endpoints there are.

    def saturation(self, candidates: Candidates) -> float:
        size = len(candidates)
        if not size:
            return 1.0
        snapshot, rows = candidates.snapshot, candidates.rows
        if snapshot is not self._snapshot:
            self._snapshot = snapshot
            self._stages = set()
            self._view = {}
        stage = b"" if rows is None else rows.tobytes()
        if stage not in self._stages:
            self._stages.add(stage)
            self._see(snapshot, range(size) if rows is None else rows.tolist())
        return 0.0

    def step(self, candidates: Candidates) -> float:
        return UNKNOWN_STEP

    def _see(self, snapshot: Snapshot, rows: "range | list[int]") -> None:
        sizes = self._capacities(snapshot).tolist()
        real = self._real.tolist()
        for row in rows:
            pod = self.programs.pod(snapshot.endpoints[row])
            pod.capacity = sizes[row]
            self._view[pod.key] = pod
            self._sources[pod.key] = real[row]
        if snapshot.endpoint_list is not self._endpoint_list:
            self._endpoint_list = snapshot.endpoint_list
            kept = {(endpoint.slot, endpoint.generation): None for endpoint in snapshot.endpoints}
            for gone in self.programs.keep_pods(kept):
                self._hide(gone)

    def _capacities(self, snapshot: Snapshot) -> Floats:
        """Returns the size of each endpoint's KV cache in tokens: float64, shape (endpoints,); 0 if the endpoint has no room."""
        if snapshot is not self._sizes_of:
            nothing = np.full(len(snapshot.endpoints), np.nan)
            tokens: Floats = snapshot.values.get(CACHE_TOKENS.name, nothing)
            fallback = 0.0 if self.params.require_real_capacity else float(self.params.capacity_tokens)
            with np.errstate(invalid="ignore"):
                self._real = snapshot.known & np.isfinite(tokens) & (tokens > 0.0)
            self._sizes, self._sizes_of = np.where(self._real, tokens, fallback), snapshot
        return self._sizes

    # The fairness policy: which program goes next.

    def share(self, key: object) -> Turns:
        return Turns(self)

    def tend(self, now: float) -> None:
        self.programs.expire(now)
        idle_s: float = self.params.shed_idle_seconds
        if idle_s > 0.0 and now - self._shed_at >= SHED_EVERY_S:
            self._shed_at = now
            each = float(self.params.buffer_tokens_per_program)
            for pod in self._view.values():
                over = self._used(pod, now) - pod.capacity * self.params.util_threshold
                if pod.capacity > 0.0 and over > 0.0 and (count := self.programs.shed(pod, over, idle_s, each, now)):
                    self._services.count(self, SHEDS).add(n=count)

    def roomiest(self, now: float) -> tuple[Pod | None, float]:
        if not self._view:
            return None, float("inf")
        best, most = None, 0.0
        for pod in self._view.values():
            room = pod.capacity * self.params.util_threshold - self._used(pod, now) - pod.reserved
            if room > most:
                best, most = pod, room
        return best, most

    def required(self, tokens: float) -> float:
        return float(tokens + self.params.buffer_tokens_per_program)

    def starves(self, waited_s: float) -> bool:
        return 0.0 < self._starves_s <= waited_s

    def went(self, kind: int, waited_s: float) -> None:
        self._releases.add(CLASSES[kind])
        if waited_s >= HELD_S:
            self._holds.add(CLASSES[kind])
        if self.starves(waited_s):
            self._services.count(self, STARVED).add()

    def _used(self, pod: Pod, now: float) -> float:
        used = self.programs.load(pod, now) + self.params.buffer_tokens_per_program * len(pod.programs)
        return float(used)

    # The scorer: where a program goes.

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        fairness_id, now = request.fairness_id, request.now
        if fairness_id == DEFAULT_FLOW:
            return None
        program = self.programs.find(fairness_id)
        for pod in (self.programs.reserved_for(fairness_id, now), program.pod if program is not None else None):
            at = _index(pod, candidates) if pod is not None else -1
            if at >= 0:
                scores = candidates.zeros()
                scores[at] = 1.0
                return scores
        held = np.array([self._load(endpoint, now) for endpoint in candidates.endpoints])
        sizes = candidates.narrow(self._capacities(candidates.snapshot))
        share: Floats = np.divide(held, sizes, out=np.ones(len(held)), where=sizes > 0.0)
        return 1.0 - np.minimum(share, 1.0)

    def _load(self, endpoint: Endpoint, now: float) -> float:
        pod = self.programs.pods.get((endpoint.slot, endpoint.generation))
        return 0.0 if pod is None else self.programs.load(pod, now)

    # The life of a request.

    def before_send(self, request: Request, decision: Decision) -> None:
        run = decision.runs.get(self.params.profile_name or decision.primary)
        if run is None or request.fairness_id == DEFAULT_FLOW:
            return
        fairness_id = request.fairness_id
        estimate = self.programs.estimate(request.body_bytes)
        final = request.headers.get(self._final_header, "").strip().lower() in ("true", "1")
        pod = self.programs.pod(run.target)
        if self.programs.begin(fairness_id, pod, estimate, request.now, final=final):
            self._services.count(self, REBINDS).add()
        request[self._turn] = Turn(fairness_id, estimate)

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        turn = request[self._turn]
        if turn is None:
            return
        usage = response.usage
        total = 0
        if usage is not None:
            self.programs.refine(request.body_bytes, usage.prompt or 0)
            total = (usage.prompt or 0) + (usage.completion or 0)
        answered = 200 <= response.status < 400
        if self.programs.end(turn.fairness_id, turn.estimate, total, request.now, answered=answered):
            self._services.count(self, FINALS).add()

    # Upkeep.

    def _sweep(self) -> None:
        if count := self.programs.sweep():
            self._services.count(self, EVICTIONS).add(n=count)

    def _show(self) -> None:
        programs, utilization, capacity = self._shown
        now, bound = self.programs.now, self.programs.bound()
        programs.set(float(bound), "bound")
        programs.set(float(len(self.programs) - bound), "unbound")
        for pod in self._view.values():
            utilization.set(self._used(pod, now) / pod.capacity if pod.capacity > 0.0 else 1.0, pod.label)
            real = self._sources.get(pod.key, False)
            capacity.set(pod.capacity if real else 0.0, pod.label, "real")
            capacity.set(0.0 if real else pod.capacity, pod.label, "fallback")

    def _hide(self, pod: Pod) -> None:
        _, utilization, capacity = self._shown
        self._sources.pop(pod.key, None)
        utilization.set(0.0, pod.label)
        for source in ("real", "fallback"):
            capacity.set(0.0, pod.label, source)


def _index(pod: Pod, candidates: Candidates) -> int:
    """Returns the index of a pod among the candidates; -1 if the pod is no candidate."""
    row = candidates.snapshot.endpoint_list.row_of_owner.get(pod.owner, -1)
    if row < 0 or (candidates.snapshot.endpoints[row].slot, candidates.snapshot.endpoints[row].generation) != pod.key:
        return -1
    if candidates.rows is None:
        return row
    at = int(np.searchsorted(candidates.rows, row))
    return at if at < len(candidates) and candidates.rows[at] == row else -1
