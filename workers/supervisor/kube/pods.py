"""Turns pods into endpoints, by pure functions. Decodes only the fields that the picker needs.

A pod is ready when its Ready condition is true, it has no deletion timestamp, and it has an address. A ready pod has one endpoint per
target port, named `<pod>-rank-<i>`, where i is the position of the port in the pool's list. The annotation `active-ports` keeps only the
ports that it lists. Words in it that are no numbers are ignored, and a pod with an empty list has no endpoint.

An endpoint has the UID of its pod: the same name or address with another UID is another endpoint. It also has the labels of its pod. If
the label `kubernetes.io/hostname` is missing, it is added with the name of the node, so that plugins know which endpoints share a host.
"""

import ipaddress
from collections.abc import Sequence, Set
from typing import Annotated, Final, NamedTuple

import msgspec

from epp.endpoints.label_selectors import Selector
from epp.endpoints.topology import HOST_LABEL
from workers.supervisor.endpoints.discovery import LABELS_MAX, EndpointSpec, Labels
from workers.supervisor.endpoints.names import reaches_server

ACTIVE_PORTS: Final = "llm-d.ai/active-ports"
ACTIVE_PORTS_LEGACY: Final = "inference.networking.k8s.io/active-ports"
LABEL_CHARS_MAX: Final = 512  # Kubernetes allows 317 for the key and 63 for the value
# limit for all labels of a pod, because the supervisor encodes the labels of all endpoints at each change
LABELS_CHARS_MAX: Final = 16 << 10
PORTS_CHARS_MAX: Final = 4096  # of the annotation
DIGITS_END: Final = 16  # a number with this many digits cannot be a port, and is not parsed


class Pod(NamedTuple):
    """A pod. `active_ports`: the text of the annotation; None without the annotation. `node`: the IP address of its node, or "" if
    unknown.
    """

    namespace: str
    name: str
    uid: str
    address: str
    ready: bool
    labels: Labels = ()
    active_ports: str | None = None
    node: str = ""


Uid = Annotated[str, msgspec.Meta(max_length=128)]
Address = Annotated[str, msgspec.Meta(max_length=64)]
NodeName = Annotated[str, msgspec.Meta(max_length=253)]
PortList = Annotated[str, msgspec.Meta(max_length=PORTS_CHARS_MAX)]


class _Annotations(msgspec.Struct):
    active_ports: PortList | None = msgspec.field(default=None, name=ACTIVE_PORTS)
    legacy: PortList | None = msgspec.field(default=None, name=ACTIVE_PORTS_LEGACY)


class _Metadata(msgspec.Struct):
    name: str
    namespace: str = ""
    uid: Uid = ""
    deletion: str | None = msgspec.field(default=None, name="deletionTimestamp")
    labels: dict[str, str] | None = None
    annotations: _Annotations | None = None


class _Condition(msgspec.Struct):
    type: str = ""
    status: str = ""


class _PodStatus(msgspec.Struct):
    ip: Address | None = msgspec.field(default=None, name="podIP")
    node_ip: Address | None = msgspec.field(default=None, name="hostIP")
    conditions: list[_Condition] | None = None


class _PodSpec(msgspec.Struct):
    node: NodeName | None = msgspec.field(default=None, name="nodeName")


class _Pod(msgspec.Struct):
    metadata: _Metadata
    spec: _PodSpec | None = None
    status: _PodStatus | None = None


_decoder = msgspec.json.Decoder(_Pod)


def decode_pod(raw: bytes) -> Pod:
    """Decodes a pod as the API server sends it (JSON).

    Raises msgspec.MsgspecError if it is not a valid pod, has longer texts than Kubernetes allows, or has more labels than an endpoint may
    have. Labels are limited because the endpoints of all pods share one document, which is written anew at each change.
    """
    found = _decoder.decode(raw)
    metadata, status = found.metadata, found.status or _PodStatus()
    is_ready = any(c.type == "Ready" and c.status == "True" for c in status.conditions or ())
    annotations = metadata.annotations or _Annotations()
    labels = metadata.labels or {}
    if len(labels) > LABELS_MAX:
        raise msgspec.ValidationError(f"the pod has {len(labels)} labels, and at most {LABELS_MAX} are read")
    if any(len(key) + len(value) > LABEL_CHARS_MAX for key, value in labels.items()):
        raise msgspec.ValidationError(f"a label of the pod has more than {LABEL_CHARS_MAX} characters")
    if sum(len(key) + len(value) for key, value in labels.items()) > LABELS_CHARS_MAX:
        raise msgspec.ValidationError(f"the labels of the pod have more than {LABELS_CHARS_MAX} characters together")
    if found.spec is not None and found.spec.node:
        labels.setdefault(HOST_LABEL, found.spec.node)
    return Pod(
        metadata.namespace,
        metadata.name,
        metadata.uid,
        status.ip or "",
        is_ready and metadata.deletion is None,
        tuple(sorted(labels.items())),
        annotations.legacy if annotations.active_ports is None else annotations.active_ports,
        status.node_ip or "",
    )


def specs_of(pod: Pod, selector: Selector, ports: Sequence[int], pool: int = 0) -> tuple[EndpointSpec, ...]:
    """Returns the pod's endpoints in a pool with this selector and these target ports. Returns no endpoints if the pod is not ready.

    `pool`: the number of the pool.
    """
    if not pod.ready or not selector.matches(dict(pod.labels)):
        return ()
    try:
        address = ipaddress.ip_address(pod.address)
    except ValueError:
        return ()  # the pod has no address yet, or has lost it
    host = str(address)
    if not reaches_server(host):
        return ()
    active = active_ports(pod.active_ports, ports)
    return tuple(
        EndpointSpec(pod.namespace, f"{pod.name}-rank-{rank}", host, port, pod.labels, pod.uid, node=_ip(pod.node), pool=pool)
        for rank, port in enumerate(ports)
        if port in active
    )


def _ip(text: str) -> str:
    """Returns the canonical form of an IP address, or "" if the text is no address."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return ""


def active_ports(annotation: str | None, ports: Sequence[int]) -> Set[int]:
    """Returns the target ports that the annotation lists. Returns all target ports without the annotation."""
    if annotation is None:
        return frozenset(ports)
    parts = (part.strip() for part in annotation.split(","))
    listed = {int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < DIGITS_END}
    return listed.intersection(ports)
