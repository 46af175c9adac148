"""The parts of an InferencePool that a picker reads."""

import json
from typing import Any

import msgspec
import pytest

from epp.endpoints.label_selectors import of_labels
from workers.supervisor.kube.pool import InferencePool, decode_pool, protocol_mismatch


def pool(metadata: dict[str, Any] | None = None, **spec: Any) -> bytes:
    good = {"selector": {"matchLabels": {"b": "2", "a": "1"}}, "targetPorts": [{"number": 8000}, {"number": 8001}]}
    return json.dumps({"metadata": {"name": "p", "uid": "u", **(metadata or {})}, "spec": good | spec}).encode()


def test_a_pool_has_a_selector_ports_and_a_protocol() -> None:
    found = decode_pool(pool(appProtocol="http", endpointPickerRef={"name": "x"}))
    assert found == InferencePool(of_labels({"a": "1", "b": "2"}), (8000, 8001), "http", "u", service="x")
    assert found.selector.text == "a=1,b=2"


def test_a_pool_names_the_service_of_its_picker_and_the_port() -> None:
    for reference, named in (
        ({"name": "epp", "port": {"number": 9002}}, ("epp", 9002)),
        ({"name": "epp", "group": "example.com", "kind": "Picker", "port": {"number": 9002}}, ("", 0)),
    ):
        found = decode_pool(pool(endpointPickerRef=reference))
        assert (found.service, found.port) == named


@pytest.mark.parametrize("protocol", ["http", "kubernetes.io/h2c", None])
@pytest.mark.parametrize("reference", [None, {"name": "picker"}, {"name": "picker", "port": {"number": 9002}, "failureMode": "FailOpen"}])
def test_the_picker_needs_no_reference_to_itself_and_takes_each_protocol(reference: dict[str, Any] | None, protocol: str | None) -> None:
    given = {"endpointPickerRef": reference, "appProtocol": protocol}
    found = decode_pool(pool(**{name: value for name, value in given.items() if value is not None}))
    assert (found.ports, found.app_protocol) == ((8000, 8001), protocol or "")
    assert protocol_mismatch(found, [("openai-parser", ("h2c", "http"))]) == ""


def test_a_pool_has_up_to_8_ports() -> None:
    ports = tuple(range(8000, 8008))
    assert decode_pool(pool(targetPorts=[{"number": port} for port in ports])).ports == ports
    with pytest.raises(msgspec.ValidationError, match="length <= 8"):
        decode_pool(pool(targetPorts=[{"number": port} for port in range(8000, 8009)]))


def test_a_pool_without_labels_selects_all_pods_of_its_namespace() -> None:
    selector = decode_pool(pool(selector={})).selector
    assert (selector.text, selector.matches({"any": "pod"})) == ("", True)


def test_a_port_that_is_listed_twice_counts_once() -> None:
    assert decode_pool(pool(targetPorts=[{"number": 1}, {"number": 2}, {"number": 1}])).ports == (1, 2)


def test_a_pool_with_a_deletion_timestamp_is_deleted() -> None:
    assert decode_pool(pool({"deletionTimestamp": "2030-01-01T00:00:00Z"})).deleted


@pytest.mark.parametrize("ports", [[], [{"number": 0}], [{"number": 65536}], [{}], None, [{"number": 1}] * 9])
def test_invalid_ports_are_refused(ports: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_pool(pool(targetPorts=ports))


@pytest.mark.parametrize(
    ("protocol", "parsers", "fits"),
    [
        ("http", [("openai-parser", ("h2c", "http"))], True),
        ("kubernetes.io/h2c", [("openai-parser", ("h2c", "http"))], True),
        ("kubernetes.io/h2c", [("vllmgrpc-parser", ("h2c",))], True),
        ("http", [("openai-parser", ("h2c", "http")), ("vllmgrpc-parser", ("h2c",))], False),
        ("", [("vllmgrpc-parser", ("h2c",))], True),
        ("http", [("passthrough-parser", ())], True),
        ("http", [], True),
    ],
)
def test_every_parser_that_lists_protocols_must_list_the_protocol_of_the_pool(
    protocol: str, parsers: list[tuple[str, tuple[str, ...]]], fits: bool
) -> None:
    why = protocol_mismatch(InferencePool(of_labels({}), (1,), protocol), parsers)
    assert (why == "") == fits
    assert fits or "appProtocol is 'http', which parser 'vllmgrpc-parser' does not read" in why
