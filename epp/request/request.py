"""Holds one inference request as plugins see it, parsed once."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from epp.data import Datum
from epp.request.budget import Budget
from epp.request.client_headers import DEFAULT_FLOW, OBJECTIVE, first_value

if TYPE_CHECKING:
    from epp.candidates import Candidates
    from epp.decision.decision import ProfileRun

T = TypeVar("T")

NOTHING: Final[Mapping[str, Any]] = {}
BYTES_PER_TOKEN: Final = 4  # the usual estimate if no plugin tokenizes


class Media(NamedTuple):
    """Holds an image, video or audio clip in a prompt. `content`: the URL or the data of the medium."""

    modality: str
    content: str


class Feature(NamedTuple):
    """Describes one media item of a tokenized prompt: `length` tokens from index `offset` stand for it. Equal content has an equal hash."""

    modality: str
    hash: str
    offset: int
    length: int


class Parts(NamedTuple):
    """Holds the parts of a body that a tokenizer needs. A parser extracts them.

    `prompts`: for each prompt its texts (UTF-8) and media, in order.
    `token_ids`: for each prompt its token ids, if the client has tokenized; then `prompts` is empty. `features`: the media items of a
    single such prompt.
    `render`: the API that can render `body` (a JSON object) to tokens: "chat", "completions" or "responses"; empty if no API can.
    `structured`: whether messages have content of several parts. `messages`: Anthropic's body, if `body` is the chat made of it.
    """

    prompts: Sequence[Sequence[bytes | Media]] = ()
    token_ids: Sequence[Sequence[int]] = ()
    render: str = ""
    body: bytes | memoryview = b""
    structured: bool = False
    features: Sequence[Feature] = ()
    messages: bytes | memoryview = b""


class Prompt:
    """Holds the prompt that the model server will prefill, as canonical bytes. If two conversations begin alike, their bytes begin alike,
    too.

    A parser makes it. `canonical` is computed on first use, because not every configuration reads it. `body` and `read`: the parser sets
    both, so that each call of `parts()` can read the parts from the body. `several`: the canonical bytes of each prompt if the request
    has more than one, else empty; a model server computes and caches each prompt separately.
    """

    __slots__ = ("_made", "_make", "body", "read", "several")

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._made: bytes | None = None
        self.body: bytes | memoryview = b""
        self.read: Callable[[bytes | memoryview], Parts] | None = None
        self.several: Sequence[bytes] = ()

    def parts(self) -> Parts:
        """Returns the parts of the body. If the parser sets no `read`, returns the canonical bytes as one text."""
        return Parts(prompts=((self.canonical,),)) if self.read is None else self.read(self.body)

    @property
    def canonical(self) -> bytes:
        """Returns the bytes to hash for prefix matching; BYTES_PER_TOKEN bytes stand for one token."""
        made = self._made
        if made is None:
            made = self._made = self._make()
        return made

    @property
    def tokens(self) -> int:
        """Returns the estimated number of prompt tokens. `epp.request.tokens.token_count` is exact if there is a token producer."""
        return -(-len(self.canonical) // BYTES_PER_TOKEN)


EMPTY_PROMPT: Final = Prompt(lambda: b"")


class Subset:
    """Holds the gateway's list of allowed endpoints: `ip:port` or `ip`. An empty list allows no endpoint."""

    __slots__ = ("entries",)

    def __init__(self, entries: Sequence[str]) -> None:
        self.entries = tuple(entries)


class Extent(NamedTuple):
    """Says what a request may cost beyond one answer to one prompt of text. A parser sets it.

    `choices`: answers to each prompt. `prompts`: the largest possible number of prompts. `unseen_tokens`: how many prompt tokens may come
    from content to which the body only refers: media by URL, stored conversations. `hidden`: whether the answer lacks generated tokens,
    such as reasoning.
    """

    choices: int = 1
    prompts: int = 1
    unseen_tokens: int = 0
    hidden: bool = False


USUAL: Final = Extent()


class Tenant:
    """Who sends a request. `name`: the tenant's name, which is also the fairness id of its requests. `budget`: None without limits.

    `objectives`: the InferenceObjectives that the tenant may use; empty if it may use any. A request that names no objective, or one that
    its tenant may not use, gets the first of these. `salt`: the cache salt of the tenant's requests, so that the tenant shares no prefixes
    with others; "" if clients give the salt.
    """

    __slots__ = ("budget", "members", "name", "objectives", "salt")

    def __init__(self, name: str, objectives: Sequence[str] = (), salt: str = "", budget: Budget | None = None) -> None:
        self.name = name
        self.budget = budget
        self.objectives = objectives
        self.salt = salt
        self.members: dict[str, bytes] = {}  # the salt as a member of a body, by the member's name; parsers determine the names

    def objective(self, claimed: str) -> str:
        """Returns the objective of a request, or "". `claimed`: the objective that the client names, or ""."""
        objectives = self.objectives
        return claimed if not objectives or claimed in objectives else objectives[0]

    def may_send(self, headers: Mapping[str, str]) -> bool:
        """Returns whether model servers may get the client's objective header: it is absent, or the tenant may use this objective."""
        claimed = first_value(headers, OBJECTIVE) if self.objectives else None
        return claimed is None or self.objective(claimed) == claimed


class Request:
    """Holds the request of one stream. Plugins read it and write data by `request[DATUM] = value`.

    Two extension points may write more: a Parser sets the fields of the body, and a RequestHeader plugin may set `fairness_id`.

    From the gateway: `id`, `path` (no query string), `headers` (names in lower case), `body_bytes` (unpacked if the body is gzip),
    `subset` (None if any endpoint is allowed).
    From the body: `model`, `prompt`, `streaming`, `max_tokens` (for each choice of each prompt; None without a limit), `cache_salt`,
    `extent` (None means USUAL), `salted` (whether the body may have a cache salt, of whatever form). `prompt` and `cache_salt` are
    empty after the decision. `target_model`: the model that is requested from the model server.
    For flow control: `fairness_id`, `priority`, `ttl_s` (the longest wait in seconds that the client wants; None if it does not say).
    `tenant`: the tenant that the gateway or an API key names (None if no tenants are configured). Times in monotonic seconds: `arrived_at`,
    when its body was complete; `now`, which the runtime sets at each phase (decision, response headers, body chunk, end); `sent_at`, when
    the picker answered the gateway. The runtime sets: `profile`, the name of the running profile; `considered`, the candidates from which
    profiles start; `runs`, the profile runs so far; `emptied`, for each profile that ended without a candidate, the candidates after each
    of its filters; `unscored`, the scorers that raised, so that the request was routed without them.
    """

    __slots__ = (
        "arrived_at", "body_bytes", "cache_salt", "considered", "data", "emptied", "extent", "fairness_id", "headers", "id", "max_tokens",
        "model", "now", "path", "priority", "profile", "prompt", "runs", "salted", "sent_at", "streaming", "subset", "target_model",
        "tenant", "ttl_s", "unscored", "wishes",
    )  # fmt: skip

    def __init__(
        self,
        *,
        id: str,
        path: str,
        headers: Mapping[str, str],
        now: float,
        model: str = "",
        body_bytes: int = 0,
        subset: Subset | None = None,
        fairness_id: str = DEFAULT_FLOW,
        priority: int = 0,
        ttl_s: float | None = None,
    ) -> None:
        self.id = id
        self.path = path
        self.headers = headers
        self.arrived_at = self.now = now
        self.model = model
        self.target_model = model
        self.prompt = EMPTY_PROMPT
        self.streaming = False
        self.max_tokens: int | None = None
        self.extent: Extent | None = None
        self.cache_salt = ""
        self.salted = True
        self.body_bytes = body_bytes
        self.subset = subset
        self.fairness_id = fairness_id
        self.priority = priority
        self.ttl_s = ttl_s
        self.tenant: Tenant | None = None
        # Whether the request may have client headers (`epp.request.client_headers`): a cheap check before expensive ones.
        self.wishes = False
        self.sent_at = 0.0
        self.profile = ""
        self.considered: Candidates | None = None
        self.runs: Mapping[str, ProfileRun | None] = NOTHING
        self.emptied: Mapping[str, Sequence[Candidates]] = NOTHING
        self.unscored: tuple[str, ...] = ()
        # While a foreign plugin runs, `epp.points.guard` puts a mapping here that refuses undeclared keys.
        self.data: MutableMapping[str | tuple[str, str], Any] = {}

    def __getitem__(self, datum: Datum[T]) -> Any:
        """Returns the value of `datum` for this request (for the running profile, if `per_profile`), or the default if no value is set.

        The return type is not T, because the default is None in most cases, and compiled code would refuse None where T is promised.
        """
        key = (datum.name, self.profile) if datum.per_profile else datum.name
        data = self.data
        if isinstance(data, dict):  # nearly always a dict; compiled code reads a dict without a method call
            return data.get(key, datum.default)
        return data.get(key, datum.default)

    def give(self, profile: str, datum: Datum[T], value: T) -> None:
        """Sets a `per_profile` datum for the named profile. A profile handler calls this before that profile runs."""
        self.data[datum.name, profile] = value

    def __setitem__(self, datum: Datum[T], value: T) -> None:
        """Sets the value of `datum` for this request, or for the running profile if it is `per_profile`."""
        self.data[(datum.name, self.profile) if datum.per_profile else datum.name] = value
