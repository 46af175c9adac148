"""Decodes the parts of an InferencePool (inference.networking.k8s.io/v1) that a picker needs: the selector, ports and protocol."""

from collections.abc import Collection, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec

from epp.endpoints.label_selectors import Selector, of_labels

VERSION: Final = "v1"
PLURAL: Final = "inferencepools"
PORTS_MAX: Final = 8
PROTOCOL_PREFIX: Final = "kubernetes.io/"  # protocol names that Kubernetes defines begin with this


class InferencePool(NamedTuple):
    """A pool: the selector of its pods, and their ports. An empty `app_protocol` means that the pool names no protocol.

    `service`, `port`: the Service of its picker, and the port of that Service; "" and 0 if the pool names no Service.
    """

    selector: Selector
    ports: tuple[int, ...]
    app_protocol: str = ""
    uid: str = ""
    deleted: bool = False  # whether the pool has a deletion timestamp; a finalizer may still delay its removal
    service: str = ""
    port: int = 0


class _Metadata(msgspec.Struct):
    name: str = ""
    uid: str = ""
    deletion: str | None = msgspec.field(default=None, name="deletionTimestamp")


class _Selector(msgspec.Struct):
    match_labels: dict[str, str] | None = msgspec.field(default=None, name="matchLabels")


class _Port(msgspec.Struct):
    number: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class _Picker(msgspec.Struct):
    name: str = ""
    group: str = ""
    kind: str = "Service"
    port: _Port | None = None


class _Spec(msgspec.Struct):
    selector: _Selector
    ports: Annotated[list[_Port], msgspec.Meta(min_length=1, max_length=PORTS_MAX)] = msgspec.field(name="targetPorts")
    app_protocol: str | None = msgspec.field(default=None, name="appProtocol")
    picker: _Picker | None = msgspec.field(default=None, name="endpointPickerRef")


class _InferencePool(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec


_decoder = msgspec.json.Decoder(_InferencePool)


def decode_pool(raw: bytes) -> InferencePool:
    """Decodes a pool as the API server sends it (JSON). Raises msgspec.MsgspecError if it is not a valid pool."""
    found = _decoder.decode(raw)
    spec, metadata = found.spec, found.metadata
    ports = tuple(dict.fromkeys(port.number for port in spec.ports))
    selector = of_labels(spec.selector.match_labels or {})
    picker = spec.picker or _Picker()
    is_service = picker.kind == "Service" and not picker.group
    service, port = (picker.name, picker.port.number if picker.port is not None else 0) if is_service else ("", 0)
    return InferencePool(selector, ports, spec.app_protocol or "", metadata.uid, metadata.deletion is not None, service, port)


def protocol_mismatch(pool: InferencePool, parsers: Sequence[tuple[str, Collection[str]]]) -> str:
    """Returns why a parser cannot read the protocol of the pool's servers; "" if all parsers can.

    `parsers`: the name of each parser and the protocols that it lists. A parser that lists no protocol reads every protocol.
    """
    protocol = pool.app_protocol.removeprefix(PROTOCOL_PREFIX)
    wrong = [name for name, listed in parsers if listed and protocol not in listed]
    if not protocol or not wrong:
        return ""
    named = ", ".join(f"'{name}'" for name in wrong)
    return f"the pool's appProtocol is '{pool.app_protocol}', which parser {named} does not read; use other parsers or correct the pool"
