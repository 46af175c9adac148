"""What a decision is: the targets, how each profile came to its own, and headers for the model server.

A decision keeps what it was made of (references, no copies), so that it can be explained as long as somebody holds it.
"""

from collections.abc import Mapping, Sequence

from epp.candidates import Candidates, Endpoint, Scores


class ProfileRun:
    """One run of one profile.

    `candidates`: who was left to pick from, `totals` their weighted sums, `picked` indices into them, best first. `passed` is
    who was left after each filter; `scores` what each of the profile's scorers said (None: 0 for everyone), in their order,
    without the static ones.
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
        """Picked endpoints, best first."""
        return [self.candidates.endpoint(index) for index in self.picked]

    @property
    def row(self) -> int:
        """Where the first pick stands in the snapshot: the index of its values in whatever was made for all endpoints."""
        picked, rows = self.picked[0], self.candidates.rows
        return picked if rows is None else int(rows[picked])


class Decision:
    """Where the request goes: `targets` in order of preference; `headers` go to the model server with it.

    `runs` has every profile that ran (None: its filters left nobody), `primary` names the one whose targets these are, `prefill`
    the one whose target computes the prompt for it, if such a profile ran. `removed_headers` do not reach the model server.
    """

    __slots__ = ("headers", "prefill", "primary", "removed_headers", "runs", "shadows", "targets")

    def __init__(self, targets: Sequence[Endpoint], runs: Mapping[str, ProfileRun | None], primary: str) -> None:
        self.targets = tuple(targets)
        self.runs = runs
        self.primary = primary
        self.prefill = PREFILL
        self.headers: dict[str, str] = {}
        self.removed_headers: tuple[str, ...] = ()
        self.shadows: Mapping[str, ProfileRun | None] = NO_SHADOWS


SERVED = "x-gateway-destination-endpoint-served"  # in the gateway's metadata
PREFILL = "prefill"  # what the field calls the profile, unless a profile handler says otherwise
NO_SHADOWS: Mapping[str, ProfileRun | None] = {}


class Response:
    """The model server's answer, as far as it has come. Status 0: none came.

    Plugins read it. `headers` has names in lower case. ResponseReceived plugins may put headers for the client into
    `set_headers`; ResponseComplete plugins may put dynamic metadata (namespace -> key -> value) into `metadata`, which goes to
    the gateway with the last piece of the body. `gateway` is what the gateway says of its balancing, key -> value; None: nothing.
    """

    __slots__ = ("gateway", "headers", "metadata", "set_headers", "status", "streaming", "usage", "whole")

    def __init__(self, status: int = 0, headers: Mapping[str, str] | None = None, *, streaming: bool = False) -> None:
        self.status = status
        self.headers: Mapping[str, str] = headers if headers is not None else {}
        self.streaming = streaming
        self.gateway: Mapping[str, object] | None = None
        self.usage: Usage | None = None
        self.whole = False  # it has come to its end; False at ResponseComplete: something cut it short
        self.set_headers: dict[str, str] = {}
        self.metadata: dict[str, dict[str, object]] = {}

    @property
    def served(self) -> str:
        """Who served the request, `ip:port`, where the gateway says so; empty: it does not."""
        said = self.gateway.get(SERVED) if self.gateway is not None else None
        return said if isinstance(said, str) else ""


class Usage:
    """Tokens as the model server reports them; None where it does not."""

    __slots__ = ("cached", "completion", "prompt")

    def __init__(self, prompt: int | None = None, completion: int | None = None, cached: int | None = None) -> None:
        self.prompt = prompt
        self.completion = completion
        self.cached = cached

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Usage) and (self.prompt, self.completion, self.cached) == (
            other.prompt,
            other.completion,
            other.cached,
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Usage(prompt={self.prompt}, completion={self.completion}, cached={self.cached})"
