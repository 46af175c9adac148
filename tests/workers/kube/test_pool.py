"""What a picker reads of an InferencePool."""

import json
from typing import Any

import msgspec
import pytest

from workers.kube.pool import Pool, decode_pool, unspoken
from workers.kube.selector import of_labels


def pool(metadata: dict[str, Any] | None = None, **spec: Any) -> bytes:
    good = {"selector": {"matchLabels": {"b": "2", "a": "1"}}, "targetPorts": [{"number": 8000}, {"number": 8001}]}
    return json.dumps({"metadata": {"name": "p", "uid": "u", **(metadata or {})}, "spec": good | spec}).encode()


def test_a_pool_says_whose_pods_which_ports_and_which_protocol() -> None:
    found = decode_pool(pool(appProtocol="http", endpointPickerRef={"name": "x"}))
    assert found == Pool(of_labels({"a": "1", "b": "2"}), (8000, 8001), "http", "u")
    assert found.selector.text == "a=1,b=2"


def test_a_pool_without_labels_selects_all_pods_of_its_namespace() -> None:
    selector = decode_pool(pool(selector={})).selector
    assert (selector.text, selector.matches({"any": "pod"})) == ("", True)


def test_a_port_counts_once() -> None:
    assert decode_pool(pool(targetPorts=[{"number": 1}, {"number": 2}, {"number": 1}])).ports == (1, 2)


def test_a_pool_that_somebody_has_deleted_says_so() -> None:
    assert decode_pool(pool({"deletionTimestamp": "2030-01-01T00:00:00Z"})).deleted


@pytest.mark.parametrize("ports", [[], [{"number": 0}], [{"number": 65536}], [{}], None, [{"number": 1}] * 9])
def test_ports_that_are_none_are_refused(ports: Any) -> None:
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
def test_every_parser_that_lists_protocols_must_list_the_pools(
    protocol: str, parsers: list[tuple[str, tuple[str, ...]]], fits: bool
) -> None:
    why = unspoken(Pool(of_labels({}), (1,), protocol), parsers)
    assert (why == "") == fits
    assert fits or "appProtocol is 'http', which parser 'vllmgrpc-parser' does not read" in why
