"""Counts the tokens of requests in flight, and releases them: the work of `inflight-load-producer`.

This code is not in the plugin's class, because mypyc makes no native class of a plugin, and these methods run for each request.
"""

from collections.abc import Callable, Sequence
from typing import Final

from epp.candidates import Endpoint
from epp.data import Datum
from epp.decision.decision import Decision, ProfileRun
from epp.learning.costs import LearnedCosts
from epp.plugin import Learning, LoadCounts
from epp.prefix.match import PrefixMatch
from epp.request import Request
from epp.request.tokens import token_count

LOOK_S: Final = 0.01  # the time between two looks for requests that are due
LONGEST_S: Final = 60.0  # if the first token is predicted later than this, a request keeps its tokens until the token comes
NONE: Final[Sequence[tuple[Endpoint, int]]] = ()


class Held:
    """Holds the counted tokens of one request. `endpoint`: the primary target; None if no tokens are counted there. `tokens`: these tokens.

    `secondary`: (endpoint, tokens) for the targets of other profiles, which have done their work when the answer begins. `due`: when the
    first token is predicted, in monotonic seconds, while the request is in `Dues`; `slot`: that of the endpoint that computes the prompt.
    """

    __slots__ = ("due", "endpoint", "secondary", "slot", "tokens")

    def __init__(self) -> None:
        self.endpoint: Endpoint | None = None
        self.tokens = 0
        self.secondary = NONE
        self.due = 0.0
        self.slot = -1


class Output:
    """Estimates the tokens of answers: `ratio` times the prompt's tokens, at most the request's own limit and `most`, if not None."""

    def __init__(self, ratio: float, most: int | None) -> None:
        self._ratio = ratio
        self._most = most

    def tokens(self, request: Request, prompt: int) -> int:
        output = round(prompt * self._ratio)
        for limit in (request.max_tokens, self._most):
            if limit is not None:
                output = min(output, limit)
        return output


class Dues:
    """Holds requests that are not streamed, by the predicted time of the first token. Times are monotonic seconds.

    `now`: roughly the time; grows by LOOK_S with each look while there are requests. The requests of the same LOOK_S are in one list, so
    adding a request takes the same time however many there are.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.count = 0
        self._lists: dict[int, list[Held]] = {}  # by due / LOOK_S; at most LONGEST_S / LOOK_S lists

    def add(self, now: float, held: Held) -> None:
        """Takes a request that is sent `now`."""
        self.now = max(self.now, now)
        self.count += 1
        number = int(held.due / LOOK_S)
        among = self._lists.get(number)
        if among is None:
            self._lists[number] = [held]
        else:
            among.append(held)

    def due(self) -> list[Held]:
        """Moves `now` on by LOOK_S. Returns and forgets the requests that are due."""
        self.now += LOOK_S
        due: list[Held] = []
        for number in [number for number in self._lists if number <= self.now / LOOK_S]:
            among = self._lists.pop(number)
            later = [held for held in among if held.due > self.now]
            if later:
                self._lists[number] = later
            due += [held for held in among if held.due <= self.now] if later else among
        self.count -= len(due)
        return due


class HeldTokens:
    """Counts the tokens of each request from its dispatch on, and releases them once.

    `match`: the prefix matches to use. `learned`: the predictions to read. `held`: where a request keeps its `Held`.
    """

    def __init__(
        self,
        load: LoadCounts,
        learning: Learning,
        *,
        match: Datum[PrefixMatch],
        learned: Datum[LearnedCosts],
        held: Datum[Held],
        output: Output | None,
        look_later: Callable[[], bool],
    ) -> None:
        """With `output`, also counts tokens of answers, until their end. `look_later` returns whether it will call `look` after LOOK_S."""
        self._load = load
        self._learning = learning
        self._match = match
        self._learned = learned
        self._held = held
        self._output = output
        self._look_later = look_later
        self._looking = False
        self._dues = Dues()

    def sent(self, request: Request, decision: Decision) -> None:
        """Counts the tokens of a request at the targets of its decision."""
        held = Held()
        request[self._held] = held  # from here on, `ended` releases the counted tokens, whatever fails below
        prompt = token_count(request)
        match: PrefixMatch | None = request[self._match]
        output = 0 if self._output is None else self._output.tokens(request, prompt)
        primary = decision.run(decision.primary)
        if primary is not None:
            tokens = _uncached(prompt, match, primary) + output
            self._count(primary.target, tokens, 1)
            held.endpoint, held.tokens = primary.target, tokens
        if len(decision.runs) > 1:
            others = [run for name, run in decision.runs.items() if run is not None and name != decision.primary]
            for run in others:
                tokens = _uncached(prompt, match, run) + output
                self._count(run.target, tokens, 1)
                held.secondary = [*held.secondary, (run.target, tokens)]
        if not request.streaming and primary is not None:
            self._release_when_due(request, decision.run(decision.prefill) or primary, held)

    def begun(self, request: Request) -> None:
        """Takes the first token of an answer."""
        held: Held | None = request[self._held]
        if held is not None:
            self._release(held, self._output is None)

    def ended(self, request: Request) -> None:
        """Takes the end of an answer."""
        held: Held | None = request[self._held]
        if held is not None:
            self._release(held, True)

    def look(self) -> None:
        """Releases the tokens of requests that are due."""
        self._looking = False
        for held in self._dues.due():
            if held.endpoint is not None or held.secondary:
                self._learning.begins(held.slot, held.due)
                self._release(held, self._output is None)
        if self._dues.count:
            self._looking = self._look_later()

    def _release_when_due(self, request: Request, computes: ProfileRun, held: Held) -> None:
        learned: LearnedCosts | None = request[self._learned]
        if learned is None:
            return
        predicted = learned.predicted_s(computes.row)
        if predicted < LONGEST_S:
            held.slot, held.due = computes.target.slot, request.now + predicted
            self._dues.add(request.now, held)
            if not self._looking:
                self._looking = self._look_later()

    def _release(self, held: Held, everything: bool) -> None:
        secondary, endpoint = held.secondary, held.endpoint
        if secondary:
            held.secondary = NONE
            for other, tokens in secondary:
                self._count(other, -tokens, -1)
        if everything and endpoint is not None:
            held.endpoint = None
            self._count(endpoint, -held.tokens, -1)

    def _count(self, endpoint: Endpoint, tokens: int, prompts: int) -> None:
        self._load.add_tokens(endpoint, tokens)
        self._learning.counts(endpoint.slot, prompts)


def _uncached(prompt: int, match: PrefixMatch | None, run: ProfileRun) -> int:
    """Returns how many of the tokens of a prompt the picked endpoint has to compute."""
    if match is None or match.counted is None:
        return prompt
    return max(0, prompt - int(match.counted.item(run.row)))
