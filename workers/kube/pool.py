"""An InferencePool (inference.networking.k8s.io/v1) as far as a picker needs it: whose pods, which ports, which protocol."""

from collections.abc import Collection, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec

from workers.kube.selector import Selector, of_labels

POOL_GROUP: Final = "inference.networking.k8s.io"  # where nothing else is said
VERSION: Final = "v1"
PLURAL: Final = "inferencepools"
PORTS_MAX: Final = 8
PROTOCOL_PREFIX: Final = "kubernetes.io/"  # of those that Kubernetes names


class Pool(NamedTuple):
    """Who belongs to it. Without `app_protocol` nothing is said about what the servers speak."""

    selector: Selector
    ports: tuple[int, ...]
    app_protocol: str = ""
    uid: str = ""
    deleted: bool = False  # somebody has, and what holds it up is not ours


class _Metadata(msgspec.Struct):
    name: str = ""
    uid: str = ""
    deletion: str | None = msgspec.field(default=None, name="deletionTimestamp")


class _Selector(msgspec.Struct):
    match_labels: dict[str, str] | None = msgspec.field(default=None, name="matchLabels")


class _Port(msgspec.Struct):
    number: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class _Spec(msgspec.Struct):
    selector: _Selector
    ports: Annotated[list[_Port], msgspec.Meta(min_length=1, max_length=PORTS_MAX)] = msgspec.field(name="targetPorts")
    app_protocol: str | None = msgspec.field(default=None, name="appProtocol")


class _InferencePool(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec


_decoder = msgspec.json.Decoder(_InferencePool)


def decode_pool(raw: bytes) -> Pool:
    """A pool as the API server sends it. Raises msgspec.MsgspecError on what is none."""
    found = _decoder.decode(raw)
    spec, metadata = found.spec, found.metadata
    ports = tuple(dict.fromkeys(port.number for port in spec.ports))
    selector = of_labels(spec.selector.match_labels or {})
    return Pool(selector, ports, spec.app_protocol or "", metadata.uid, metadata.deletion is not None)


def unspoken(pool: Pool, parsers: Sequence[tuple[str, Collection[str]]]) -> str:
    """Why these parsers, by name with the protocols they list, do not fit the pool's servers; "" if they do.

    A parser that lists none fits any.
    """
    spoken = pool.app_protocol.removeprefix(PROTOCOL_PREFIX)
    wrong = [name for name, listed in parsers if listed and spoken not in listed]
    if not spoken or not wrong:
        return ""
    named = ", ".join(f"'{name}'" for name in wrong)
    return f"the pool's appProtocol is '{pool.app_protocol}', which parser {named} does not read; use other parsers or correct the pool"
