"""The findings about a gateway's configuration: the shipped one has none, and each mistake in it is named."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from workers.cli.doctor.gateway import DEPTH_MAX, Peer, client_header_findings, gateway_findings, tls_names

ROOT = Path(__file__).parents[4]
SHIPPED = ("deploy/envoy.yaml", "deploy/envoy-retry.yaml")
PEER = Peer(tls=True, waits_s=60.0)


def shipped() -> Any:
    return yaml.safe_load((ROOT / SHIPPED[0]).read_text())


def processor(config: Any) -> Any:
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    return manager["http_filters"][0]["typed_config"]


def cluster(config: Any) -> Any:
    return config["static_resources"]["clusters"][0]


def http2(config: Any) -> Any:
    (options,) = cluster(config)["typed_extension_protocol_options"].values()
    return options["explicit_http_config"]["http2_protocol_options"]


@pytest.mark.parametrize("file", SHIPPED)
def test_the_shipped_configuration_has_no_finding(file: str) -> None:
    assert gateway_findings(yaml.safe_load((ROOT / file).read_text()), PEER) == []


MISTAKES: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "frames": ("gateway-frames", "warning", lambda c: http2(c).pop("max_outbound_frames")),
    "control frames": ("gateway-frames", "warning", lambda c: http2(c).update(max_outbound_control_frames="500")),
    "buffered": ("gateway-full-duplex", "warning", lambda c: mode(c, request_body_mode="BUFFERED")),
    "streamed": ("gateway-full-duplex", "error", lambda c: mode(c, request_body_mode="STREAMED")),
    "no answers": ("gateway-full-duplex", "warning", lambda c: mode(c, response_body_mode="NONE")),
    "trailers": ("gateway-trailers", "error", lambda c: mode(c, response_trailer_mode="SKIP")),
    "open to failure": ("gateway-failure-mode", "warning", lambda c: processor(c).update(failure_mode_allow=True)),
    "default time-out": ("gateway-timeout", "error", lambda c: processor(c).pop("message_timeout")),
    "short time-out": ("gateway-timeout", "warning", lambda c: processor(c).update(message_timeout="5s")),
    "circuit breaker": ("gateway-circuit-breaker", "warning", lambda c: cluster(c).pop("circuit_breakers")),
    "short connect": ("gateway-connect-timeout", "warning", lambda c: cluster(c).update(connect_timeout="1s")),
    "no HTTP/2": ("gateway-http2", "error", lambda c: cluster(c).pop("typed_extension_protocol_options")),
    "plaintext": ("gateway-tls", "error", lambda c: cluster(c).pop("transport_socket")),
    "no cluster": ("gateway-cluster", "error", lambda c: cluster(c).update(name="other")),
    "no filter": ("gateway-filter", "error", lambda c: processor(c).pop("@type")),
}


def mode(config: Any, **changes: str) -> None:
    processor(config)["processing_mode"].update(changes)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_named_with_evidence_and_a_fix(mistake: str) -> None:
    rule, severity, make = MISTAKES[mistake]
    config = shipped()
    make(config)
    (found,) = gateway_findings(config, PEER)
    assert (found.rule, found.severity) == (rule, severity)
    assert found.evidence
    assert found.fix


def test_a_picker_without_tls_needs_a_gateway_without_tls() -> None:
    assert [found.rule for found in gateway_findings(shipped(), Peer(tls=False, waits_s=0.0))] == ["gateway-tls"]


def test_a_filter_of_another_external_processor_does_not_count_if_one_reaches_the_picker() -> None:
    config, other = shipped(), shipped()
    processor(other)["grpc_service"]["envoy_grpc"]["cluster_name"] = cluster(other)["name"] = "other"
    processor(other)["failure_mode_allow"] = True
    cluster(other)["load_assignment"] = {}
    both = [config, other]
    assert gateway_findings(both, PEER._replace(ports=[9002])) == []
    assert [found.rule for found in gateway_findings(both, PEER._replace(ports=[7]))] == ["gateway-failure-mode"]


def test_a_dump_of_the_admin_port_is_read_as_the_file_is() -> None:
    config = shipped()
    http2(config).clear()
    dump = {
        "configs": [
            {"@type": "type.googleapis.com/envoy.admin.v3.BootstrapConfigDump", "bootstrap": config},
            {"@type": "type.googleapis.com/envoy.admin.v3.ClustersConfigDump", "static_clusters": [{"cluster": cluster(config)}]},
        ]
    }
    assert [found.rule for found in gateway_findings(dump, PEER)] == ["gateway-frames", "gateway-frames"]


@pytest.mark.parametrize("config", [None, [], "text", 7, {"static_resources": None}])
def test_a_document_that_is_no_configuration_has_no_filter(config: Any) -> None:
    assert [found.rule for found in gateway_findings(config, PEER)] == ["gateway-filter"]


def test_a_document_with_many_levels_ends() -> None:
    deep: Any = {}
    for _ in range(10 * DEPTH_MAX):
        deep = {"inner": deep}
    assert [found.rule for found in gateway_findings(deep, PEER)] == ["gateway-filter"]


def test_names_and_ca_that_the_gateway_verifies_are_read() -> None:
    config = shipped()
    common = cluster(config)["transport_socket"]["typed_config"]["common_tls_context"]
    assert tls_names(config) == ((), False)
    common["validation_context"] = {
        "trusted_ca": {"filename": "ca.crt"},
        "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": "epp.default.svc"}}],
    }
    assert tls_names(config) == (("epp.default.svc",), True)


ODD: tuple[Any, ...] = (None, "x", 7, float("inf"), True, [], {}, [None], ["x"], {"a": None})


def replaced(node: Any, odd: Any) -> Iterator[None]:
    """Puts `odd` into each place of a document in turn."""
    for key in list(node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()):
        kept, node[key] = node[key], odd
        yield
        node[key] = kept
        yield from replaced(kept, odd)


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_no_value_in_a_configuration_ends_the_command(odd: Any) -> None:
    config = shipped()
    names = {"matcher": {"exact": "epp"}}
    validation = {"trusted_ca": {"filename": "ca.pem"}, "match_typed_subject_alt_names": [names]}
    cluster(config)["transport_socket"]["typed_config"]["common_tls_context"] = {"validation_context": validation}
    assert tls_names(config) == (("epp",), True)
    for _ in replaced(config, odd):
        gateway_findings(config, PEER)
        tls_names(config)
        client_header_findings("fairness,objective", config, (9002,))
