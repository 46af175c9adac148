"""Chooses the pool of a request, by port, authority, metadata or model: the first of these that decides.

    port of the stream        ─┐
    :authority of the stream  ─┼─▶ of_stream   ─▶ pool, or UNDECIDED
    metadata of the gateway   ───▶ of_metadata ─▶ pool, or UNDECIDED, or Refused
    model in the body         ───▶ of_model    ─▶ pool, or Refused

A pool is the index of its `Matched` in the list. A `*` in a matcher matches any text, even an empty text. An exact matcher takes precedence
over a matcher with `*`. Among several matchers with `*` that fit, the first one decides. `epp.config.pools_file` refuses lists in which a
matcher never fits.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from compiled import calls
from epp.errors import UNREADABLE, Cause, Refused
from epp.protocol import codec
from epp.protocol.surrogates import replaced

UNDECIDED: Final = -1
KEPT_MAX: Final = 4096  # answers that are kept, because streams and requests repeat them
KEPT_CHARS_MAX: Final = 256  # characters of a name that is kept with its answer, and of a name in a refusal
SHOWN_MAX: Final = 20  # pools that a refusal names
ANY: Final = "*"
KEY: Final = "llm-d.ai/pool"
_NAMESPACE: Final = codec.METADATA_NAMESPACE.encode()
_PATH: Final = (KEY.encode(),)
_MODEL: Final = (b"model",)
_MISSING: Final = msgspec.Raw()
_text: Final = msgspec.json.Decoder(str)
# Made by `defstruct`, because msgspec cannot read annotations of compiled classes.
_named: Final = msgspec.json.Decoder(msgspec.defstruct("_Named", [("model", str, "")]))


class Matched(NamedTuple):
    """Says which requests are for a pool. `port`: the pool's own port, or 0. `authorities`: the authorities of the pool, in lower case."""

    name: str
    port: int = 0
    authorities: Sequence[str] = ()
    models: Sequence[str] = ()


class Pattern:
    """A matcher with at least one `*`."""

    def __init__(self, text: str) -> None:
        self._first, *middle, self._last = text.split(ANY)
        self._middle = [part for part in middle if part]

    def fits(self, name: str) -> bool:
        """Returns whether the pattern matches the whole name. Only a `*` in the pattern matches a `*` in `name`. So `name` may be another
        pattern; the result then says whether this pattern matches all names that the other one matches.
        """
        at, end = len(self._first), len(name) - len(self._last)
        if at > end or not name.startswith(self._first) or not name.endswith(self._last):
            return False
        for part in self._middle:
            at = name.find(part, at, end)
            if at < 0:
                return False
            at += len(part)
        return True

    def meets(self, other: "Pattern") -> bool:
        """Returns whether there is a name that both patterns match."""
        begins = self._first.startswith(other._first) or other._first.startswith(self._first)
        return begins and (self._last.endswith(other._last) or other._last.endswith(self._last))


class _Names:
    def __init__(self, matchers: Sequence[tuple[str, int]]) -> None:
        """`matchers`: the text and the pool of each matcher, in the order of the list."""
        self.exact = {text: pool for text, pool in matchers if ANY not in text}
        self.patterns = [(Pattern(text), pool) for text, pool in matchers if ANY in text]
        self._kept: dict[str, int] = {}

    def find(self, name: str) -> int:
        """Returns the pool with the matcher that fits; UNDECIDED if no matcher fits."""
        pool = self.exact.get(name, UNDECIDED)
        if pool != UNDECIDED or not self.patterns:
            return pool
        kept = self._kept.get(name)
        if kept is not None:
            return kept
        for pattern, owner in self.patterns:
            if pattern.fits(name):
                pool = owner
                break
        if len(name) <= KEPT_CHARS_MAX:
            if len(self._kept) >= KEPT_MAX:  # bounded, because clients choose models
                self._kept.clear()
            self._kept[name] = pool
        return pool


class PoolChoice:
    """Knows which requests are for which pool. The object is immutable: if the pools change, a new object takes its place.

    `by_model`: the pools that a model can decide on.
    """

    def __init__(self, pools: Sequence[Matched]) -> None:
        self._names = [pool.name for pool in pools if pool.name]
        self._by_name = {pool.name: index for index, pool in enumerate(pools)}
        self._by_port = {pool.port: index for index, pool in enumerate(pools) if pool.port}
        self._authorities = _Names([(text, index) for index, pool in enumerate(pools) for text in pool.authorities])
        self._models = _Names([(text, index) for index, pool in enumerate(pools) for text in pool.models])
        self._hosts: dict[str, int] = {}  # authority -> the result of `_of_authority`

        self.by_model = sorted(set(self._models.exact.values()) | {pool for _, pool in self._models.patterns})

    @property
    def ports(self) -> Mapping[int, int]:
        """The pools that have ports of their own, by port."""
        return self._by_port

    def of_stream(self, port: int, authority: str) -> int:
        """Returns the pool of all requests of a stream; UNDECIDED if the request decides. `port`: the port of the stream's socket;
        `authority`: the authority as the peer sent it.
        """
        pool = self._by_port.get(port, UNDECIDED)
        if pool != UNDECIDED or not authority:
            return pool
        kept = self._hosts.get(authority)
        if kept is None:
            if len(self._hosts) >= KEPT_MAX:  # bounded, because the peer chooses the authority
                self._hosts.clear()
            kept = self._of_authority(authority.lower())
            if len(authority) <= KEPT_CHARS_MAX:
                self._hosts[authority] = kept
        return kept

    def _of_authority(self, authority: str) -> int:
        """Returns the pool of an authority, with its port or without. A matcher that names the port takes precedence."""
        names, host = self._authorities, host_of(authority)
        for text in (authority, host):
            if text in names.exact:
                return names.exact[text]
        return next((pool for pattern, pool in names.patterns if pattern.fits(authority) or pattern.fits(host)), UNDECIDED)

    def of_metadata(self, message: bytes) -> int:
        """Returns the pool that the gateway names; UNDECIDED if it names no pool. `message`: the ProcessingRequest with the headers.

        Raises Refused for an unknown name, and ProtocolViolation for malformed metadata.
        """
        name = codec.metadata_text(message, _NAMESPACE, _PATH)
        if not name:
            return UNDECIDED
        pool = self._by_name.get(name, UNDECIDED)
        if pool == UNDECIDED:
            raise self._refused(f"there is no pool '{_short(name)}'")
        return pool

    def named_models(self, pool: int) -> list[str]:
        """Returns the models that a pool lists by their whole names, in the order of the list."""
        return [model for model, owner in self._models.exact.items() if owner == pool]

    def pool_of_model(self, model: str) -> int:
        """Returns the pool of a model; UNDECIDED without such a pool. `model`: the client's name, or ""."""
        return self._models.find(model) if model else UNDECIDED

    def of_model(self, model: str) -> int:
        """Returns the pool of a model, as `pool_of_model` does. Raises Refused without such a pool."""
        pool = self.pool_of_model(model)
        if pool == UNDECIDED:
            raise self._refused(f"no pool serves the model '{_short(model)}'" if model else "no pool serves a request that names no model")
        return pool

    def _refused(self, why: str) -> Refused:
        return Refused(Cause.NO_POOL, f"{why}; pools: {listed(self._names)}")


def host_of(authority: str) -> str:
    """Returns an authority without its port."""
    host, colon, port = authority.rpartition(":")
    return host if colon and port.isdigit() and (":" not in host or host.endswith("]")) else authority


def model_of(body: bytes | memoryview) -> str:
    """Returns the model that a JSON body names; "" if the body names no model, or is no JSON object."""
    try:
        found = calls.members(body, _MODEL, _MISSING)
        if found is not None:
            return "" if found[0] is _MISSING else str(_text.decode(found[0]))
        named: Any = _named.decode(body)
        return str(named.model)
    except UNREADABLE:
        readable = replaced(body)
    return "" if readable is None else model_of(readable)


def _short(name: str) -> str:
    return name if len(name) <= KEPT_CHARS_MAX else f"{name[:KEPT_CHARS_MAX]}…"


def listed(names: Sequence[str]) -> str:
    """Returns the first names of pools, and how many more there are."""
    more = len(names) - SHOWN_MAX
    return f"{', '.join(names[:SHOWN_MAX])}{f' and {more} more' if more > 0 else ''}"


def no_such_pool(name: str, known: Sequence[str]) -> str:
    """Returns why there is no pool with the name; "" if the name is one of `known`, or "".

    `known`: the names of several pools, with "" for a place without a pool; empty if there is only one pool.
    """
    if not name or name in known:
        return ""
    if not known:
        return "this picker has only one pool"
    present = [each for each in known if each]
    return f"there is no pool '{_short(name)}'; {f'pools: {listed(present)}' if present else 'the picker has found none yet'}"
