"""The endpoints of a pod, for all values of its fields."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.endpoints.label_selectors import Selector, of_labels
from tests.cases import cases
from workers.supervisor.kube.pods import ACTIVE_PORTS, ACTIVE_PORTS_LEGACY, active_ports, decode_pod, specs_of

APP = of_labels({"app": "vllm"})
HUGE = 1 << 20
READY = {"type": "Ready", "status": "True"}


def pod(**changes: Any) -> dict[str, Any]:
    """A ready pod; `metadata`, `spec` and `status` are merged into it."""
    metadata = {"name": "vllm-0", "namespace": "prod", "uid": "u1", "labels": {"app": "vllm", "a": "b"}}
    status = {"podIP": "10.0.0.1", "conditions": [{"type": "Initialized", "status": "True"}, READY]}
    return {
        "metadata": metadata | changes.get("metadata", {}),
        "spec": {"containers": [{"name": "server"}]} | changes.get("spec", {}),
        "status": status | changes.get("status", {}),
    }


def found(thing: Any, selector: Selector = APP, ports: tuple[int, ...] = (8000,)) -> list[tuple[str, str, int]]:
    decoded = decode_pod(json.dumps(thing).encode())
    return [(spec.name, spec.host, spec.port) for spec in specs_of(decoded, selector, ports)]


def test_a_ready_pod_has_an_endpoint_per_port_with_the_position_of_the_port_as_rank() -> None:
    specs = specs_of(decode_pod(json.dumps(pod()).encode()), APP, (8000, 8001))
    assert [spec[:4] for spec in specs] == [("prod", "vllm-0-rank-0", "10.0.0.1", 8000), ("prod", "vllm-0-rank-1", "10.0.0.1", 8001)]
    for spec in specs:
        assert spec.labels == (("a", "b"), ("app", "vllm"))
        assert spec.uid == "u1"


@cases(
    "thing",
    [
        pod(metadata={"deletionTimestamp": "2030-01-01T00:00:00Z"}),
        pod(metadata={"labels": {"app": "other"}}),
        pod(metadata={"labels": None}),
        pod(status={"conditions": []}),
        pod(status={"conditions": None}),
        pod(status={"conditions": [{"type": "Ready", "status": "False"}]}),
        pod(status={"conditions": [{"type": "Ready", "status": "Unknown"}]}),
        pod(status={"conditions": [{"type": "ContainersReady", "status": "True"}]}),
        pod(status={"podIP": ""}),
        pod(status={"podIP": None}),
        pod(status={"podIP": "no address"}),
        {"metadata": {"name": "x"}},
    ],
)
def test_a_pod_that_cannot_serve_has_no_endpoint(thing: dict[str, Any]) -> None:
    assert found(thing) == []


def test_a_pod_with_an_ipv6_address_has_an_endpoint() -> None:
    assert found(pod(status={"podIP": "FD00:0::1"})) == [("vllm-0-rank-0", "fd00::1", 8000)]


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "224.0.0.1", "ff02::1", "010.1.2.3", "name"])
def test_an_address_that_no_pod_can_have_makes_no_endpoint(address: str) -> None:
    assert found(pod(status={"podIP": address})) == []


@pytest.mark.parametrize("key", [ACTIVE_PORTS, ACTIVE_PORTS_LEGACY])
def test_the_annotation_keeps_only_the_ports_that_it_lists_with_their_ranks(key: str) -> None:
    thing = pod(metadata={"annotations": {key: " 8002, x,8000,9999,", "other": "y"}})
    assert found(thing, ports=(8000, 8001, 8002)) == [("vllm-0-rank-0", "10.0.0.1", 8000), ("vllm-0-rank-2", "10.0.0.1", 8002)]
    assert found(pod(metadata={"annotations": {key: ""}})) == []


def test_the_newer_annotation_wins() -> None:
    assert found(pod(metadata={"annotations": {ACTIVE_PORTS: "8000", ACTIVE_PORTS_LEGACY: "1"}})) != []


@pytest.mark.parametrize("text", ["8000", "08000", " 8000 ", "x,8000", "8000,8000", "٨٠٠٠,8000", "9" * 5000 + ",8000"])
def test_anything_but_numbers_in_the_annotation_is_ignored(text: str) -> None:
    assert active_ports(text, (8000, 8001)) == {8000}


@pytest.mark.parametrize("raw", [b"{}", b"[]", b'{"metadata": {"name": 5}}', b"{", b'{"metadata": {"name": "a", "labels": {"a": 1}}}'])
def test_an_object_that_is_not_a_pod_is_refused(raw: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_pod(raw)


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        ({f"key-{n}": "v" * 58 for n in range(15_000)}, "the pod has 15000 labels, and at most 256 are read"),
        ({"key": "v" * 1_000_000}, "a label of the pod has more than 512 characters"),
        ({f"key-{n}": "v" * 500 for n in range(250)}, "the labels of the pod have more than 16384 characters together"),
    ],
)
def test_a_pod_with_a_megabyte_of_labels_is_refused(labels: dict[str, str], text: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=text):
        decode_pod(json.dumps(pod(metadata={"labels": labels})).encode())


@pytest.mark.parametrize(
    "long",
    [
        {"metadata": {"annotations": {ACTIVE_PORTS: "8000," * 200_000}}},
        {"metadata": {"annotations": {ACTIVE_PORTS_LEGACY: "8000," * 200_000}}},
        {"metadata": {"uid": "u" * HUGE}},
        {"status": {"podIP": "1" * HUGE}},
        {"status": {"hostIP": "1" * HUGE}},
        {"spec": {"nodeName": "n" * HUGE}},
    ],
)
def test_a_pod_with_a_text_of_a_megabyte_is_refused(long: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError, match="of length <="):
        decode_pod(json.dumps(pod(**long)).encode())


NAMES = st.sampled_from(("a", "app", "b"))
PORTS = st.lists(st.integers(1, 65535), min_size=1, max_size=8, unique=True)


@given(
    labels=st.none() | st.dictionaries(NAMES, st.sampled_from(("x", "y"))),
    wanted=st.dictionaries(NAMES, st.sampled_from(("x", "y")), max_size=2),
    ports=PORTS,
    listed=st.none() | st.lists(st.integers(0, 70000) | PORTS.map(lambda ports: ports[0]), max_size=4),
    address=st.sampled_from(("10.0.0.1", "fd00::2", "", None)),
    deleted=st.booleans(),
    ready=st.sampled_from(("True", "False", "Unknown", None)),
    uid=st.text("0123456789abcdef-", max_size=36),
)
def test_the_endpoints_of_any_pod_follow_the_rules(
    labels: dict[str, str] | None,
    wanted: dict[str, str],
    ports: list[int],
    listed: list[int] | None,
    address: str | None,
    deleted: bool,
    ready: str | None,
    uid: str,
) -> None:
    metadata: dict[str, Any] = {"labels": labels, "uid": uid}
    if deleted:
        metadata["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    if listed is not None:
        metadata["annotations"] = {ACTIVE_PORTS: ",".join(map(str, listed))}
    conditions = [] if ready is None else [{"type": "Ready", "status": ready}]
    thing = pod(metadata=metadata, status={"podIP": address, "conditions": conditions})
    specs = specs_of(decode_pod(json.dumps(thing).encode()), of_labels(wanted), ports)
    serves = ready == "True" and not deleted and bool(address) and wanted.items() <= (labels or {}).items()
    expected = [(f"vllm-0-rank-{i}", port) for i, port in enumerate(ports) if serves and (listed is None or port in listed)]
    assert [(spec.name, spec.port) for spec in specs] == expected
    assert {spec.uid for spec in specs} <= {uid}


@pytest.mark.parametrize(
    ("spec", "own", "expected"),
    [
        ({"nodeName": "n7"}, {}, "n7"),
        ({"nodeName": "n7"}, {"kubernetes.io/hostname": "mine"}, "mine"),
        ({}, {}, None),
        ({"nodeName": None}, {}, None),
    ],
)
def test_the_label_of_the_host_is_the_node_unless_the_pod_has_one(spec: dict[str, Any], own: dict[str, str], expected: str | None) -> None:
    thing = pod(spec=spec, metadata={"labels": {"app": "vllm", **own}})
    assert dict(decode_pod(json.dumps(thing).encode()).labels).get("kubernetes.io/hostname") == expected
