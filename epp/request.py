"""One inference request as the scheduler sees it: parsed once, read by every plugin."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from epp.data import Datum

if TYPE_CHECKING:
    from epp.candidates import Candidates
    from epp.decision import ProfileRun

T = TypeVar("T")

DEFAULT_FLOW = "default-flow"
NOTHING: Mapping[str, Any] = {}
BYTES_PER_TOKEN = 4  # the field's estimate where nobody tokenises


class Media(NamedTuple):
    """An image, video or audio clip in a prompt: its URL, or its data."""

    modality: str
    content: str


class Feature(NamedTuple):
    """One media item of a prompt: `length` tokens from `offset` stand for it. Equal content has an equal hash."""

    modality: str
    hash: str
    offset: int
    length: int


class Parts(NamedTuple):
    """What a parser finds in a body for who tokenises.

    `prompts`: texts and media of each prompt in order. `token_ids`: instead of them, where the caller has tokenised; `features` are
    the media among those of a single prompt. `render`: what renders the prompt, "chat" or "completions", of the JSON object `body`;
    empty: nothing does. `structured`: messages have content of several parts.
    """

    prompts: Sequence[Sequence[bytes | Media]] = ()
    token_ids: Sequence[Sequence[int]] = ()
    render: str = ""
    body: bytes | memoryview = b""
    structured: bool = False
    features: Sequence[Feature] = ()


class Prompt:
    """What the model server will prefill, as canonical bytes: equal prefixes of conversations give equal prefixes of bytes.

    Made by a parser. `canonical` is computed on first use, since not every configuration reads it; likewise `parts`, for which
    the parser sets `body` and `read`. `several`: the canonical bytes of each where a request has more than one prompt, which a model
    server computes and caches one by one.
    """

    __slots__ = ("_made", "_make", "body", "read", "several")

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._made: bytes | None = None
        self.body: bytes | memoryview = b""
        self.read: Callable[[bytes | memoryview], Parts] | None = None
        self.several: Sequence[bytes] = ()

    def parts(self) -> Parts:
        """What is in the body, read anew each time. A parser that does not say leaves the canonical bytes as one text."""
        return Parts(prompts=((self.canonical,),)) if self.read is None else self.read(self.body)

    @property
    def canonical(self) -> bytes:
        """The bytes to hash, 4 to an estimated token."""
        made = self._made
        if made is None:
            made = self._made = self._make()
        return made

    @property
    def tokens(self) -> int:
        """Estimated number of prompt tokens."""
        return -(-len(self.canonical) // BYTES_PER_TOKEN)


EMPTY_PROMPT = Prompt(lambda: b"")


class Subset:
    """The gateway's list of allowed endpoints; an empty one allows none."""

    __slots__ = ("entries",)

    def __init__(self, entries: Sequence[str]) -> None:
        self.entries = tuple(entries)


class Request:
    """The request of one stream. Plugins read it, and of it write `data` alone; RequestHeader plugins may set `fairness_id` too.

    The runtime sets `now` once per phase (monotonic seconds), and `profile` to the one that runs.
    """

    __slots__ = (
        "body_bytes", "cache_salt", "considered", "data", "emptied", "fairness_id", "headers", "id", "max_tokens", "model", "now",
        "path", "priority", "profile", "prompt", "runs", "sent_at", "streaming", "subset", "target_model",
    )  # fmt: skip

    def __init__(
        self,
        *,
        id: str,
        path: str,
        headers: Mapping[str, str],
        now: float,
        model: str = "",
        prompt: Prompt = EMPTY_PROMPT,
        streaming: bool = False,
        max_tokens: int | None = None,
        cache_salt: str = "",
        body_bytes: int = 0,
        subset: Subset | None = None,
        fairness_id: str = DEFAULT_FLOW,
        priority: int = 0,
    ) -> None:
        self.id = id
        self.path = path
        self.headers = headers
        self.now = now
        self.model = model
        self.target_model = model
        self.prompt = prompt
        self.streaming = streaming
        self.max_tokens = max_tokens
        self.cache_salt = cache_salt
        self.body_bytes = body_bytes
        self.subset = subset
        self.fairness_id = fairness_id
        self.priority = priority
        self.sent_at = 0.0  # when the answer went to the gateway, on the clock of `now`
        # Set by the runtime, for plugins to know where they are and for explanations.
        self.profile = ""  # the profile that runs
        self.considered: Candidates | None = None  # whom the profiles start from
        self.runs: Mapping[str, ProfileRun | None] = NOTHING  # of the profiles so far
        self.emptied: Mapping[str, Sequence[Candidates]] = (
            NOTHING  # of a profile whose filters left nobody: who was left after each
        )
        self.data: dict[str | tuple[str, str], Any] = {}

    def __getitem__(self, datum: Datum[T]) -> T:
        """What the producer of `datum` emitted for this request (and this profile, if it is per profile), or its default."""
        if datum.per_profile:
            return self.data.get((datum.name, self.profile), datum.default)  # type: ignore[no-any-return]
        return self.data.get(datum.name, datum.default)  # type: ignore[no-any-return]

    def give(self, profile: str, datum: Datum[T], value: T) -> None:
        """For profile handlers: what `profile` will read of a datum that is per profile."""
        self.data[datum.name, profile] = value

    def __setitem__(self, datum: Datum[T], value: T) -> None:
        self.data[(datum.name, self.profile) if datum.per_profile else datum.name] = value
