"""One inference request as the scheduler sees it: parsed once, read by every plugin."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from epp.data import Datum

T = TypeVar("T")

BYTES_PER_TOKEN = 4  # the field's estimate where nobody tokenises


class Prompt:
    """What the model server will prefill, as canonical bytes: equal prefixes of conversations give equal prefixes of bytes.

    Made by a parser. `canonical` is computed on first use, since not every configuration reads it.
    """

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._made: bytes | None = None

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
    """The request of one stream. Plugins read it; the runtime sets `now` once per phase (monotonic seconds)."""

    __slots__ = (
        "body_bytes", "cache_salt", "data", "headers", "id", "max_tokens", "model", "now", "path", "priority",
        "prompt", "streaming", "subset", "target_model",
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
        self.data: dict[str, Any] = {}

    def __getitem__(self, datum: Datum[T]) -> T:
        """What the producer of `datum` emitted for this request, or its default."""
        return self.data.get(datum.name, datum.default)  # type: ignore[no-any-return]

    def __setitem__(self, datum: Datum[T], value: T) -> None:
        self.data[datum.name] = value
