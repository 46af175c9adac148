"""A real Envoy with the ext_proc filter and the cluster that each gateway's control plane writes for an InferencePool.

Envoy AI Gateway  v1.1.0, internal/extensionserver/inferencepool.go: buildHTTPFilterForInferencePool and the cluster below it
Istio             at 86c9f01f (August 2026), pilot/pkg/xds/filters/filters.go: InferencePoolExtProc, with the route's override in
                  pilot/pkg/networking/core/route/route.go, and cluster_builder.go there: applyOverrideHostPolicy
kgateway          v2.0, internal/kgateway/extensions2/plugins/inferenceextension/endpointpicker/plugin.go (later ones use
                  agentgateway for inference)
"""

import http.client
import json
from collections.abc import Callable, Sequence

import pytest

from loadtest.demo.envoy_config import PickerTls
from loadtest.demo.stack import LOOPBACK
from tests.e2e.cluster import ANSWER_S, CHAT, COMPLETIONS, Cluster, Picker, ask, chat, completion, eventually
from tests.e2e.conftest import FAST, Gateway
from tests.e2e.filters import DESTINATION, TYPES, Json, changed, narrowed

MODES = ("request_header_mode", "request_trailer_mode", "response_header_mode", "response_trailer_mode")
SEND = dict.fromkeys(MODES, "SEND")
DUPLEX = {"request_body_mode": "FULL_DUPLEX_STREAMED", "response_body_mode": "FULL_DUPLEX_STREAMED"}


def ai_gateway(mode: str, *, override: bool) -> Callable[[str], str]:
    """Returns the change for Envoy AI Gateway. `mode` and `override`: the values that the pool's annotations `processing-body-mode` and

    `allow-mode-override` set there.
    """

    def edit(_manager: Json, picker: Json, _resources: Json) -> None:
        picker["typed_config"] = {
            "@type": TYPES + "extensions.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "endpoint-picker", "authority": "picker.default.svc:9002"}},
            "processing_mode": {**SEND, "request_body_mode": mode, "response_body_mode": mode},
            "allow_mode_override": override,
            "message_timeout": "300s",
            "failure_mode_allow": False,
        }

    return changed(edit)


def istio(servers: Sequence[tuple[str, int]]) -> Callable[[str], str]:
    """Returns the change for Istio: a filter that does nothing, the override of its route, and a cluster that reads the target from

    the metadata.
    """
    lb = {"untyped": ["envoy.lb"]}

    def edit(manager: Json, picker: Json, resources: Json) -> None:
        picker.pop("disabled")
        picker["typed_config"] = {
            "@type": TYPES + "extensions.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "endpoint-picker"}, "timeout": "10s"},
            "failure_mode_allow": True,
            "processing_mode": {"request_header_mode": "SKIP", "response_header_mode": "SKIP"},
            "message_timeout": "1000s",
            "metadata_options": {"receiving_namespaces": lb, "forwarding_namespaces": lb},
        }
        overrides = {
            "failure_mode_allow": False,
            "grpc_service": {"envoy_grpc": {"cluster_name": "endpoint-picker"}},
            "processing_mode": {**SEND, **DUPLEX},
        }
        (host,) = manager["route_config"]["virtual_hosts"]
        host["typed_per_filter_config"] = {
            picker["name"]: {"@type": TYPES + "extensions.filters.http.ext_proc.v3.ExtProcPerRoute", "overrides": overrides}
        }
        spread = {"@type": TYPES + "extensions.load_balancing_policies.round_robin.v3.RoundRobin"}
        policy = {
            "@type": TYPES + "extensions.load_balancing_policies.override_host.v3.OverrideHost",
            "override_host_sources": [{"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}}],
            "selected_host_key": {"key": "envoy.lb", "path": [{"key": f"{DESTINATION}-served"}]},
            "fallback_policy": {"policies": [{"typed_extension_config": {"name": "round_robin", "typed_config": spread}}]},
        }
        hosts = [{"endpoint": {"address": {"socket_address": {"address": h, "port_value": p}}}} for h, p in servers]
        resources["clusters"][1] = {
            "name": "model-servers",
            "type": "STATIC",
            "lb_policy": "CLUSTER_PROVIDED",
            "load_balancing_policy": {"policies": [{"typed_extension_config": {"name": "override_host", "typed_config": policy}}]},
            "connect_timeout": "1s",
            "load_assignment": {"cluster_name": "model-servers", "endpoints": [{"lb_endpoints": hosts}]},
        }
        retry = {"retry_on": "connect-failure", "num_retries": 2}
        host["routes"][0]["route"]["retry_policy"] = retry

    return changed(edit)


def kgateway() -> Callable[[str], str]:
    """Returns the change for kgateway: requests are buffered, and the picker sees no response."""

    def edit(_manager: Json, picker: Json, _resources: Json) -> None:
        skipped = {"response_header_mode": "SKIP", "request_trailer_mode": "SKIP", "response_trailer_mode": "SKIP"}
        picker["typed_config"] = {
            "@type": TYPES + "extensions.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "endpoint-picker"}},
            "processing_mode": {"request_header_mode": "SEND", "request_body_mode": "BUFFERED", **skipped},
            "message_timeout": "5s",
            "failure_mode_allow": False,
        }

    return changed(edit)


@pytest.fixture(scope="module")
def secured(gateway: Gateway) -> Picker:
    """Starts a picker with a self-signed certificate, its default. Envoy AI Gateway and kgateway accept every certificate."""
    return gateway.cluster.picker(gateway.fleet.file, "--secure-serving=true", workers=1)


def serves_everything(port: int, servers: set[str]) -> None:
    """Checks that servers of the pool answer requests of each kind, and that errors of the picker reach the client."""
    whole = ask(port, COMPLETIONS, completion("a b c", max_tokens=4))
    assert whole.status == 200 and whole.json()["usage"]["completion_tokens"] == 4
    assert whole.server in servers
    streamed = ask(port, CHAT, chat("a b c", max_tokens=5, stream=True))
    assert streamed.status == 200 and streamed.body.endswith(b"data: [DONE]\n\n")
    assert ask(port, COMPLETIONS, completion("word " * 50_000, max_tokens=1)).status == 200
    assert ask(port, "/v1/models", None, method="GET").status == 200
    wrong = ask(port, COMPLETIONS, b'{"prompt": "no model"}')
    assert wrong.status == 400 and "model not found" in wrong.json()["error"]["message"]


def names(gateway: Gateway) -> set[str]:
    return {stats["server"] for stats in gateway.fleet.stats()}


@pytest.mark.parametrize(("mode", "override"), [("FULL_DUPLEX_STREAMED", False), ("BUFFERED", False), ("BUFFERED", True)])
def test_envoy_ai_gateway_is_served_in_each_of_its_modes(gateway: Gateway, secured: Picker, mode: str, override: bool) -> None:
    port = gateway.cluster.envoy(secured, threads=1, tls=PickerTls(), change=ai_gateway(mode, override=override))
    serves_everything(port, names(gateway))
    assert eventually(lambda: not secured.in_flight())


@pytest.mark.parametrize(("override", "running"), [(True, 1), (False, 0)])
def test_mode_override_lets_a_buffering_gateway_stream_its_answers(gateway: Gateway, secured: Picker, override: bool, running: int) -> None:
    """With it, the client has the first event while the model server still writes; without it, when the server is done."""
    change = ai_gateway("BUFFERED", override=override)
    port = gateway.cluster.envoy(secured, threads=1, tls=PickerTls(), change=change)
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=ANSWER_S)
    connection.request("POST", CHAT, chat("a b c", max_tokens=200, stream=True), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    assert sum(stats["running"] for stats in gateway.fleet.stats()) == running
    connection.close()
    assert eventually(lambda: not secured.in_flight())


def test_istio_routes_by_the_metadata_and_no_client_chooses_a_server(gateway: Gateway) -> None:
    port = gateway.cluster.envoy(gateway.picker, threads=1, change=istio(gateway.fleet.addresses))
    serves_everything(port, names(gateway))
    answer = ask(port, COMPLETIONS, completion("x", max_tokens=1), {DESTINATION: "127.0.0.1:1"})
    assert answer.status == 200
    assert eventually(lambda: not gateway.picker.in_flight())


def test_istio_tells_the_picker_which_server_answered(cluster: Cluster) -> None:
    fleet = cluster.fleet(3, *FAST)
    plugins: list[Json] = [
        {"type": "file-discovery", "parameters": {"path": str(fleet.file)}},
        {"type": "random-picker", "parameters": {"maxNumOfEndpoints": 2}},
        {"type": "destination-endpoint-served-verifier"},
    ]
    config = {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": plugins,
        "schedulingProfiles": [{"name": "default", "plugins": [{"pluginRef": "random-picker"}]}],
        "dataLayer": {"discovery": {"endpoints": {"pluginRef": "file-discovery"}}},
    }
    picker = cluster.picker(fleet.file, workers=1, config_text=json.dumps(config))
    port = cluster.envoy(picker, threads=1, change=istio(fleet.addresses))
    for number in range(8):
        answer = ask(port, COMPLETIONS, completion(f"{number} x", max_tokens=1))
        assert answer.status == 200
        served = answer.headers["x-conformance-test-served-endpoint"]
        assert fleet.addresses.index((LOOPBACK, int(served.rpartition(":")[2]))) == int(answer.server[-1])
    assert eventually(lambda: not picker.in_flight())


def test_kgateway_buffers_requests_and_shows_no_response(gateway: Gateway, secured: Picker) -> None:
    port = gateway.cluster.envoy(secured, threads=1, tls=PickerTls(), change=kgateway())
    serves_everything(port, names(gateway))
    assert eventually(lambda: not secured.in_flight())


def test_the_metadata_of_an_envoy_narrow_the_pool_and_attributes_change_nothing(gateway: Gateway) -> None:
    (host, port), *_ = gateway.fleet.addresses
    entrance = gateway.cluster.envoy(gateway.picker, threads=1, change=narrowed([f"{host}:{port}", "10.9.9.9:1"]))
    answers = [ask(entrance, COMPLETIONS, completion(f"{n} x", max_tokens=1)) for n in range(12)]
    assert {answer.status for answer in answers} == {200}
    assert len({answer.server for answer in answers}) == 1
    assert {ask(entrance, "/v1/models", None, method="GET").status for _ in range(4)} == {200}
    nobody = gateway.cluster.envoy(gateway.picker, threads=1, change=narrowed(["10.9.9.9:1"]))
    assert ask(nobody, COMPLETIONS, completion("x", max_tokens=1)).status == 503
    assert eventually(lambda: not gateway.picker.in_flight())
