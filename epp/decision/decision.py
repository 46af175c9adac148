"""Decision and Response: the result of scheduling a request, and the model server's response to it.

A decision keeps references to the data from which it was made (no copies), so it can be explained as long as it exists.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from epp.candidates import Candidates, Endpoint, Scores

ERRORS_FROM: Final = 400  # an HTTP status from here on is an error (RFC 9110, 15)
SERVER_ERRORS_FROM: Final = 500


class ProfileRun:
    """Holds the result of one run of one profile.

    `candidates`: the endpoints that the picker chose from. `totals`: the weighted sum of each one's scores, float64, shape (candidates,).
    `picked`: indices into `candidates`, best first, at least one.
    `passed`: the candidates after each filter, in order. `scores`: the unweighted scores of each scorer, in order, static scorers
    excluded; None means that the scorer gave all candidates 0.
    """

    __slots__ = ("candidates", "passed", "picked", "scores", "totals")

    def __init__(
        self,
        candidates: Candidates,
        totals: Scores,
        picked: Sequence[int],
        passed: Sequence[Candidates] = (),
        scores: Sequence[Scores | None] = (),
    ) -> None:
        self.candidates = candidates
        self.totals = totals
        self.picked = picked
        self.passed = passed
        self.scores = scores

    @property
    def targets(self) -> list[Endpoint]:
        """Returns the picked endpoints, best first."""
        return [self.candidates.endpoint(index) for index in self.picked]

    @property
    def target(self) -> Endpoint:
        """Returns the first picked endpoint."""
        return self.candidates.endpoint(self.picked[0])

    @property
    def row(self) -> int:
        """Returns the row of the first picked endpoint in the snapshot: its index in arrays of the shape (endpoints,)."""
        picked, rows = self.picked[0], self.candidates.rows
        return picked if rows is None else int(rows[picked])


class Ticket(Protocol):
    """The room that an admitted request takes up in flow control, until it ends (`epp.decision.admission`). The request's stream calls the
    methods.

    `done` is called exactly once. `placed` is called at most once, before `done`.
    """

    @property
    def waited(self) -> bool:
        """Returns whether the request had to wait. In the meantime, load and plugins may have changed."""

    def placed(self) -> None:
        """Called when the request is counted as in flight at its endpoint."""

    def freed(self) -> None:
        """Called when one of several endpoints of the request has done its part."""

    def done(self) -> None:
        """Called when the request has ended, with or without an endpoint."""


class Decision:
    """Says where a request goes. A ProfileHandler makes the decision, and PreRequest plugins may add `headers`; all later plugins only read
    it.

    `targets`: endpoints in order of preference, at least one. The gateway sends the request to the first one.
    `runs`: profile name -> the run of this profile, for every profile that ran; None if its filters left no candidate.
    `primary`: the profile that chose `targets`. `prefill`: the profile that chose the prefill server, if it ran.
    `headers`: name -> value, added to the request to the model server. Names are tokens, values one line of Latin-1 text.
    `removed_headers`: names of headers that are removed from the request to the model server.
    `shadows`: the runs of shadow profiles. `ticket`: see `Ticket`; None if the request was decided without admission.
    """

    __slots__ = ("headers", "prefill", "primary", "removed_headers", "runs", "shadows", "targets", "ticket")

    def __init__(self, targets: Sequence[Endpoint], runs: Mapping[str, ProfileRun | None], primary: str) -> None:
        self.targets = tuple(targets)
        self.runs = runs
        self.primary = primary
        self.prefill = PREFILL
        self.headers: dict[str, str] = {}
        self.removed_headers: tuple[str, ...] = ()
        self.shadows: Mapping[str, ProfileRun | None] = NO_SHADOWS
        self.ticket: Ticket | None = None

    def run(self, profile: str) -> ProfileRun | None:
        """Returns the run of a profile; None if the profile did not run, or its filters left no candidate."""
        runs = self.runs
        if isinstance(runs, dict):  # nearly always a dict; compiled code reads a dict without a method call
            return runs.get(profile)
        return runs.get(profile)


SERVED: Final = "x-gateway-destination-endpoint-served"  # key in the gateway's metadata
PREFILL: Final = "prefill"  # the usual name of the prefill profile; a profile handler may set another
NO_SHADOWS: Final[Mapping[str, ProfileRun | None]] = {}


class Response:
    """Holds the model server's response, as far as it has arrived. The response points of `epp.plugin` get it.

    `status`: the HTTP status; 200 if the headers have no status, 0 if no headers arrived. `headers`: names are in lower case.
    `streaming`: whether the response is streamed. `usage`: token usage, set before ResponseComplete; None if it was not reported.
    `whole`: whether the response came to its end. If it is False at ResponseComplete, the response was cut short.
    `empty`: whether the response should have tokens but has no body, set before ResponseComplete.
    `gateway`: what the gateway reports of its load balancing, key -> value; None if it reports nothing.

    Plugins may write two fields. `set_headers` (ResponseReceived): headers for the client, name -> value. `metadata`
    (ResponseComplete): dynamic metadata, namespace -> key -> value, sent to the gateway with the message that ends the answer.
    """

    __slots__ = ("empty", "gateway", "headers", "metadata", "set_headers", "status", "streaming", "usage", "whole")

    def __init__(self, status: int = 0, headers: Mapping[str, str] | None = None, *, streaming: bool = False) -> None:
        self.status = status
        self.headers: Mapping[str, str] = headers if headers is not None else {}
        self.streaming = streaming
        self.gateway: Mapping[str, object] | None = None
        self.usage: Usage | None = None
        self.whole = False
        self.empty = False
        self.set_headers: dict[str, str] = {}
        self.metadata: dict[str, dict[str, object]] = {}

    @property
    def failed(self) -> bool:
        """Returns whether the server answered with an error or with an empty response."""
        return self.empty or self.status >= ERRORS_FROM

    @property
    def served(self) -> str:
        """Returns the endpoint that served the request, `ip:port`, as the gateway reports it; empty if it was not reported."""
        address = self.gateway.get(SERVED) if self.gateway is not None else None
        return address if isinstance(address, str) else ""


class Usage:
    """Holds the token counts that the model server reports: prompt, completion, and cached prompt tokens. A count is None if the server did
    not report it.
    """

    __slots__ = ("cached", "completion", "prompt")

    def __init__(self, prompt: int | None = None, completion: int | None = None, cached: int | None = None) -> None:
        self.prompt = prompt
        self.completion = completion
        self.cached = cached

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Usage) and (self.prompt, self.completion, self.cached) == (other.prompt, other.completion, other.cached)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Usage(prompt={self.prompt}, completion={self.completion}, cached={self.cached})"


NO_USAGE: Final = Usage()  # the server reported nothing
