"""Pods -> endpoints, as pure functions. Only what is needed of a pod is decoded and kept.

A pod is ready when its Ready condition is true, nobody has deleted it, and it has an address. A ready pod has one endpoint per
target port: `<pod>-rank-<i>`, i being the port's place among the pool's. The annotation `active-ports` leaves only those that it
lists; what is no number in it is ignored, an empty list takes the pod out.

Endpoints carry the pod's UID: a name or address that comes back with another one is another endpoint.
"""

import ipaddress
from collections.abc import Sequence, Set
from typing import Final, NamedTuple

import msgspec

from workers.discovery import EndpointSpec, Labels
from workers.kube.selector import Selector

ACTIVE_PORTS: Final = "llm-d.ai/active-ports"
ACTIVE_PORTS_LEGACY: Final = "inference.networking.k8s.io/active-ports"
DIGITS_END: Final = 16  # a number with as many is no port, and not worth reading


class Pod(NamedTuple):
    """What is known of a pod. `active_ports` is the annotation's text, None without it."""

    namespace: str
    name: str
    uid: str
    address: str
    ready: bool
    labels: Labels = ()
    active_ports: str | None = None


class _Annotations(msgspec.Struct):
    active_ports: str | None = msgspec.field(default=None, name=ACTIVE_PORTS)
    legacy: str | None = msgspec.field(default=None, name=ACTIVE_PORTS_LEGACY)


class _Metadata(msgspec.Struct):
    name: str
    namespace: str = ""
    uid: str = ""
    deletion: str | None = msgspec.field(default=None, name="deletionTimestamp")
    labels: dict[str, str] | None = None
    annotations: _Annotations | None = None


class _Condition(msgspec.Struct):
    type: str = ""
    status: str = ""


class _PodStatus(msgspec.Struct):
    ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: list[_Condition] | None = None


class _Pod(msgspec.Struct):
    metadata: _Metadata
    status: _PodStatus | None = None


_decoder = msgspec.json.Decoder(_Pod)


def decode_pod(raw: bytes) -> Pod:
    """A pod as the API server sends it. Raises msgspec.MsgspecError on what is none."""
    found = _decoder.decode(raw)
    metadata, status = found.metadata, found.status or _PodStatus()
    is_ready = any(c.type == "Ready" and c.status == "True" for c in status.conditions or ())
    annotations = metadata.annotations or _Annotations()
    return Pod(
        metadata.namespace,
        metadata.name,
        metadata.uid,
        status.ip or "",
        is_ready and metadata.deletion is None,
        tuple(sorted((metadata.labels or {}).items())),
        annotations.legacy if annotations.active_ports is None else annotations.active_ports,
    )


def specs_of(pod: Pod, selector: Selector, ports: Sequence[int]) -> tuple[EndpointSpec, ...]:
    """The pod's endpoints in a pool with this selector and these target ports."""
    if not pod.ready or not selector.matches(dict(pod.labels)):
        return ()
    try:
        address = ipaddress.ip_address(pod.address)
    except ValueError:
        return ()  # none yet, or none any more
    if address.is_unspecified or address.is_multicast:
        return ()  # nobody's: a connection would end at whoever asks
    host = str(address)
    active = active_ports(pod.active_ports, ports)
    return tuple(
        EndpointSpec(pod.namespace, f"{pod.name}-rank-{rank}", host, port, pod.labels, pod.uid)
        for rank, port in enumerate(ports)
        if port in active
    )


def active_ports(annotation: str | None, ports: Sequence[int]) -> Set[int]:
    """Those of the target ports that the annotation lists; all of them without it."""
    if annotation is None:
        return frozenset(ports)
    parts = (part.strip() for part in annotation.split(","))
    listed = {int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < DIGITS_END}
    return listed.intersection(ports)
