"""Behaviour that only a real Envoy shows: control headers, retries in the picker's order, rewritten bodies, unusual orders of messages."""

import http.client
import json

import pytest

from epp.request import client_headers
from loadtest.demo import envoy_config
from loadtest.demo.ports import free_ports
from loadtest.demo.stack import LOOPBACK
from tests.e2e.cluster import COMPLETIONS, Cluster, ask, completion
from tests.e2e.echo import HEAD, Json, gateway, got, picker_for, servers

SELECTION = "test-epp-endpoint-selection"
SERVED = "x-conformance-test-served-endpoint"
CONFORMANCE = (
    HEAD
    + """plugins:
- type: header-based-testing-filter
- type: destination-endpoint-served-verifier
- {{type: max-score-picker, parameters: {{maxNumOfEndpoints: 3}}}}
- {{type: file-discovery, parameters: {{path: {file}}}}}
dataLayer: {{discovery: {{pluginRef: file-discovery}}}}
"""
)
ONE_WAY = (
    HEAD
    + """plugins:
- type: random-picker
- {{type: file-discovery, parameters: {{path: {file}}}}}
dataLayer: {{discovery: {{pluginRef: file-discovery}}}}
requestHandler: {{responsePhase: none}}
"""
)


def trusting(manager: Json, _all: Json) -> None:
    """Removes the filter that drops the client's control headers before the picker sees them."""
    del manager["early_header_mutation_extensions"]


def fail_open(manager: Json, _all: Json) -> None:
    manager["http_filters"][0]["typed_config"]["failure_mode_allow"] = True


CONTROL = [envoy_config.DESTINATION_HEADER + end for end in ("", "-subset", "-served", "-scores")]


def test_a_clients_control_headers_reach_no_server_even_if_the_gateway_does_not_drop_them(cluster: Cluster) -> None:
    with servers(2) as started:
        picker = picker_for(cluster, started)
        bare = gateway(cluster, picker.grpc, trusting)
        for port in (bare, gateway(cluster, picker.grpc)):
            for spelled in (str.lower, str.upper, str.title):
                evil = {spelled(name): "6.6.6.6:1, 7.7.7.7:1" for name in CONTROL}
                headers = got(ask(port, COMPLETIONS, completion("hello"), evil))
                received = [(name, value) for name, value in headers if name in CONTROL]
                assert len(received) == 1 and received[0][1] in {server.address for server in started}
        doubled = CONTROL[0]
        connection = http.client.HTTPConnection(LOOPBACK, bare)
        body = completion("twice")
        connection.putrequest("POST", COMPLETIONS)
        for value in ("6.6.6.6:1", "7.7.7.7:1"):
            connection.putheader(doubled, value)
        connection.putheader("content-length", str(len(body)))
        connection.endheaders(body)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        assert [v for n, v in answer["headers"] if n.lower() == doubled] == [answer["server"]]


def test_a_gateway_that_fails_open_does_not_let_the_client_choose(cluster: Cluster) -> None:
    with servers(1) as started:
        (nowhere,) = free_ports(1)
        port = gateway(cluster, nowhere, fail_open)
        for name in CONTROL:
            answer = ask(port, COMPLETIONS, completion("hello"), {name: started[0].address})
            assert answer.status == 503
        assert started[0].requests == 0


def test_a_rewritten_model_reaches_the_server_and_the_client_sees_the_original(cluster: Cluster) -> None:
    with servers(1) as started:
        port = gateway(cluster, picker_for(cluster, started).grpc)
        body = b'{ "prompt" : "x", "big":12345678901234567890, "model":"original" }'
        answer = ask(port, COMPLETIONS, body, {"x-llm-d-model-name-rewrite": "a-much-longer-name", "accept-encoding": "gzip"})
        assert answer.status == 200
        fields = json.loads(answer.body)
        assert fields["body"].encode() == body.replace(b'"original"', b'"a-much-longer-name"')
        assert fields["model"] == "original"
        headers = dict(got(answer))
        assert headers.get("content-length", str(len(fields["body"]))) == str(len(fields["body"]))
        assert "accept-encoding" not in headers
        assert json.loads(ask(port, COMPLETIONS, body).body)["body"].encode() == body


@pytest.mark.parametrize(("broken", "how"), [(1, "closes"), (2, "closes"), (2, "503"), (2, "gone")])
def test_the_next_endpoint_of_the_list_serves_when_the_earlier_ones_fail(cluster: Cluster, broken: int, how: str) -> None:
    with servers(3) as started:
        picker = picker_for(cluster, started, CONFORMANCE)
        port = gateway(cluster, picker.grpc, listed=started)
        order = [started[2], started[0], started[1]]
        answer = ask(port, COMPLETIONS, completion("hello"), {SELECTION: order[0].address})
        assert json.loads(answer.body)["server"] == order[0].address
        for server in order[:broken]:
            server.broken = how
            if how == "gone":
                server.shutdown()
                server.server_close()
        text = CONFORMANCE.replace("- type: header-based-testing-filter\n", "")
        several = cluster.picker(
            cluster.directory / "servers.yaml", workers=1, config_text=text.format(file=cluster.directory / "servers.yaml")
        )
        port = gateway(cluster, several.grpc, listed=started)
        for number in range(6):
            answer = ask(port, COMPLETIONS, completion(f"hello {number}" * (number % 2 * 200_000 + 1)))
            assert answer.status == 200
            tried = dict(got(answer))[envoy_config.DESTINATION_HEADER].split(",")
            if number == 0 and how != "gone":  # the picker soon leaves these endpoints out by itself
                assert sorted(tried) == sorted(server.address for server in started)
            alive = [address for address in tried if address not in {server.address for server in order[:broken]}]
            assert json.loads(answer.body)["server"] == alive[0]
            assert answer.headers[SERVED] == alive[0], "the picker learns which endpoint served"
        assert how == "gone" or sum(server.requests for server in order[:broken]) > 0


def test_the_gateways_metadata_reaches_plugins(cluster: Cluster) -> None:
    with servers(1) as started:
        picker = picker_for(cluster, started, CONFORMANCE)
        port = gateway(cluster, picker.grpc)
        answer = ask(port, COMPLETIONS, completion("hello"), {SELECTION: started[0].address})
        assert answer.headers[SERVED] == "fail: missing envoy lb metadata"
        assert ask(port, COMPLETIONS, completion("hello")).status == 429, "no endpoint is selected"

        def with_metadata(manager: Json, _all: Json) -> None:
            processor = manager["http_filters"][0]["typed_config"]
            processor["metadata_options"] = {"forwarding_namespaces": {"untyped": ["envoy.lb"]}}
            kind = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
            value = {"metadata_namespace": "envoy.lb", "value": {f"{CONTROL[0]}-served": started[0].address}}
            manager["http_filters"].insert(0, {"name": "with_metadata", "typed_config": {"@type": kind, "metadata": [value]}})

        answer = ask(gateway(cluster, picker.grpc, with_metadata), COMPLETIONS, completion("hello"), {SELECTION: started[0].address})
        assert answer.headers[SERVED] == started[0].address


def test_the_reply_of_an_earlier_filter_passes_through(cluster: Cluster) -> None:
    def faulty(manager: Json, _all: Json) -> None:
        kind = "type.googleapis.com/envoy.extensions.filters.http.fault.v3.HTTPFault"
        abort = {"http_status": 429, "percentage": {"numerator": 100}}
        manager["http_filters"].insert(0, {"name": "abort", "typed_config": {"@type": kind, "abort": abort}})

    with servers(1) as started:
        picker = picker_for(cluster, started)
        port = gateway(cluster, picker.grpc, faulty)
        answer = ask(port, COMPLETIONS, completion("hello"))
        assert (answer.status, answer.body) == (429, b"fault filter abort")
        assert picker.counter("violations_total") == 0


def test_without_a_response_phase_answers_bypass_the_picker(cluster: Cluster) -> None:
    with servers(1) as started:
        picker = picker_for(cluster, started, ONE_WAY)
        port = gateway(cluster, picker.grpc)
        for number in range(5):
            body = completion(f"{number}" * 40_000)
            answer = ask(port, COMPLETIONS, body)
            assert answer.status == 200 and answer.json()["body"].encode() == body
        assert ask(port, "/v1/models", None, method="GET").status == 200
        assert picker.counter("picks_total") == 6
        assert "response phase" in picker.child.text()


FAILS = """
from epp.plugin import Scorer, plugin


@plugin("fails-always")
class Fails(Scorer):
    \"\"\"A plugin with a bug.\"\"\"

    def score(self, request, candidates, profile):
        return 1 / 0
"""


def test_a_scorer_that_raises_fails_no_request_and_is_left_out_after_five_calls(cluster: Cluster) -> None:
    folder = cluster.directory / "plugins"
    folder.mkdir()
    (folder / "fails.py").write_text(FAILS)
    with servers(1) as started:
        text = ONE_WAY.replace("responsePhase: none", "responsePhase: full").replace("random-picker", "fails-always")
        picker = picker_for(cluster, started, text, f"--plugin-path={folder}")
        port = gateway(cluster, picker.grpc)
        assert [ask(port, COMPLETIONS, completion("x")).status for _ in range(8)] == [200] * 8
        page = picker.page()
        labels = '{plugin_name="fails-always",plugin_type="fails-always"}'
        assert f"llm_d_epp_plugin_faults_total{labels} 5.0" in page
        assert f"llm_d_epp_plugin_left_out{labels} 1.0" in page
        assert "requests are routed without it for a while" in picker.child.text()


WISHES = {name: "5" for names in client_headers.GROUPS.values() for name in names} | {client_headers.MODEL_REWRITE[0]: "other"}


@pytest.mark.parametrize(("flags", "honoured"), [((), "all"), (("none",), "none"), (("model",), "model")])
def test_the_model_server_gets_the_client_headers_that_the_picker_honours(cluster: Cluster, flags: tuple[str, ...], honoured: str) -> None:
    with servers(1) as started:
        picker = picker_for(cluster, started, "", *(f"--trust-client-headers={groups}" for groups in flags))
        port = gateway(cluster, picker.grpc, trusting)
        answer = ask(port, COMPLETIONS, completion("x"), WISHES)
        received = {name for name, _ in got(answer)}
        model = {*client_headers.MODEL_REWRITE}
        expected = {"all": {*WISHES}, "none": set(), "model": model}[honoured]
        assert received & {*WISHES} - {*client_headers.DEBUG} == expected - {*client_headers.DEBUG}
        sent_on = json.loads(json.loads(answer.body)["body"])["model"]
        assert sent_on == ("sim-model" if honoured == "none" else "other")
