"""Observes how long each endpoint takes to the first token, and at which load, without asking the endpoint.

This producer is for hubs, where an endpoint is the gateway of a cluster and shows no metrics. Only answers that are streamed and succeed
count, because other answers say nothing about the first token. Each worker observes its own requests. If the percentiles are older than
the interval when a request comes, the producer computes them again.
"""

import numpy as np

from epp.candidates import Candidates, EndpointList
from epp.data import INFLIGHT_REQUESTS, Datum
from epp.decision.decision import Decision, Response
from epp.learning.ttft import TtftPercentiles, ttft_percentiles
from epp.plugin import DataProducer, DataSource, PreRequest, ResponseReceived, ResponseStreaming, plugin
from epp.plugins._parameters import HubObserverParameters
from epp.plugins.producers._observations import Observations, Point, Rules
from epp.quantities import named_duration
from epp.request import Request

ABOVE_0 = "write for example 1s, or omit it"


class Sent:
    """Holds one request from its decision to its first token.

    `candidates`: set until the request is sent. `owner`, `load`: set after that: the id of the target, and the target's requests in
    flight. `counts`: whether the answer is streamed and has succeeded.
    """

    __slots__ = ("candidates", "counts", "load", "owner")

    def __init__(self, candidates: Candidates) -> None:
        self.candidates: Candidates | None = candidates
        self.owner = -1
        self.load = 0.0
        self.counts = False


@plugin("latency-observer-producer-hub")
class LatencyObserver(DataSource, DataProducer, PreRequest, ResponseReceived, ResponseStreaming):
    """Emits three points of a curve for each endpoint: the time to the first token as a function of its requests in flight.

    The floor is the 10th percentile of a long history. The points of low and typical load are percentiles of the times of recent requests,
    each with the mean load of the requests around it. You may list this plugin in `dataLayer.sources`, as the reference picker demands, but
    this picker does not demand it.
    """

    Params = HubObserverParameters
    scrapes = False
    takes_extractors = False
    replaces_default = True
    first_chunk_only = True
    consumes = (INFLIGHT_REQUESTS,)

    def __init__(self, name: str, params: HubObserverParameters) -> None:
        super().__init__(name, params)
        if params.max_requests > params.window_size:
            raise ValueError(
                f"maxRequests: {params.max_requests} is more than windowSize, {params.window_size}; lower it, or raise windowSize"
            )
        if params.low_percentile >= params.typical_percentile:
            raise ValueError(f"lowPercentile: {params.low_percentile} is not below typicalPercentile, {params.typical_percentile}")
        self._interval_s = named_duration("intervalDuration", params.interval_duration, ABOVE_0)
        self._rules = Rules(
            params.window_size,
            named_duration("maxObservationAge", params.max_observation_age, ABOVE_0),
            params.max_requests,
            params.min_requests,
            params.low_percentile / 100,
            params.typical_percentile / 100,
            named_duration("bucketDuration", params.bucket_duration, ABOVE_0),
            params.bucket_history_size,
        )
        self._percentiles = ttft_percentiles(name)
        self._sent = Datum(f"ttft_sent/{name}", Sent)
        self.produces = (self._percentiles,)
        self.keeps = (self._sent,)
        # Owner -> observations of its endpoint; as many entries as the endpoint list has endpoints, at most.
        self._observed: dict[int, Observations] = {}
        self._endpoint_list = EndpointList(())
        self._due = 0.0
        self._published = _arrays([])

    def produce(self, request: Request, candidates: Candidates) -> None:
        endpoint_list = candidates.snapshot.endpoint_list
        if endpoint_list is not self._endpoint_list or request.now >= self._due:
            self._publish(endpoint_list, request.now)
        request[self._percentiles] = self._published
        request[self._sent] = Sent(candidates)

    def before_send(self, request: Request, decision: Decision) -> None:
        sent, primary = request[self._sent], decision.runs.get(decision.primary)
        if sent is None or sent.candidates is None or primary is None:
            return
        index = sent.candidates.index_of(primary.row)
        if index >= 0:
            sent.owner = primary.target.owner
            sent.load = float(sent.candidates[INFLIGHT_REQUESTS][index])
        sent.candidates = None  # drop the loads of the other endpoints, which are not needed any more

    def response_received(self, request: Request, decision: Decision, response: Response) -> None:
        sent = request[self._sent]
        if sent is not None:
            sent.counts = 200 <= response.status < 300 and response.streaming

    def response_streaming(self, request: Request, decision: Decision) -> None:
        sent = request[self._sent]
        if sent is None or not sent.counts or sent.owner not in self._endpoint_list.row_of_owner:
            return
        observed = self._observed.get(sent.owner)
        if observed is None:
            observed = self._observed[sent.owner] = Observations(self._rules, request.now)
        observed.add(request.now, max(0.0, request.now - request.sent_at), sent.load)

    def _publish(self, endpoint_list: EndpointList, now: float) -> None:
        if endpoint_list is not self._endpoint_list:
            self._observed = {owner: each for owner, each in self._observed.items() if owner in endpoint_list.row_of_owner}
            self._endpoint_list = endpoint_list
        observed = self._observed
        self._published = _arrays([observed[e.owner].point(now) if e.owner in observed else Point() for e in endpoint_list.endpoints])
        self._due = now + self._interval_s


def _arrays(points: list[Point]) -> TtftPercentiles:
    of = np.array(points, dtype=np.float64).reshape(len(points), len(Point._fields))
    floor, low, low_load, typical, typical_load, recent = of.T
    return TtftPercentiles(floor_s=floor, low_s=low, low_load=low_load, typical_s=typical, typical_load=typical_load, recent=recent > 0.0)
