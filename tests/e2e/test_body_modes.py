"""A real Envoy in every body mode: some modes work, and in the others the client gets an error that names the mode."""

import json

import pytest
import yaml

from tests.e2e.cluster import CHAT, COMPLETIONS, ask, chat, completion
from tests.e2e.conftest import Gateway

LONG = "word " * 50_000


def in_modes(gateway: Gateway, request: str, response: str, *, override: bool = False) -> int:
    """Starts an Envoy with these body modes. Returns its port."""

    def change(text: str) -> str:
        config = yaml.safe_load(text)
        connection = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        (picker,) = [f["typed_config"] for f in connection["http_filters"] if "processing_mode" in f["typed_config"]]
        picker["processing_mode"] |= {"request_body_mode": request, "response_body_mode": response}
        picker["allow_mode_override"] = override
        return yaml.safe_dump(config)

    return gateway.cluster.envoy(gateway.picker, threads=1, change=change)


@pytest.mark.parametrize("response", ["FULL_DUPLEX_STREAMED", "BUFFERED", "STREAMED", "BUFFERED_PARTIAL", "NONE"])
def test_each_mode_of_response_bodies_passes_answers_on_unchanged(gateway: Gateway, response: str) -> None:
    port = in_modes(gateway, "FULL_DUPLEX_STREAMED", response)
    whole = ask(port, COMPLETIONS, completion("a b c", max_tokens=4))
    assert whole.status == 200 and json.loads(whole.body)["usage"]["completion_tokens"] == 4
    streamed = ask(port, CHAT, chat("a b c", max_tokens=5, stream=True))
    assert streamed.status == 200 and streamed.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("override", [False, True])
@pytest.mark.parametrize("mode", ["BUFFERED", "BUFFERED_PARTIAL"])
def test_a_gateway_that_buffers_is_answered_with_a_target(gateway: Gateway, mode: str, override: bool) -> None:
    port = in_modes(gateway, mode, "BUFFERED", override=override)
    before = gateway.fleet.requests()
    whole = ask(port, COMPLETIONS, completion("a b c", max_tokens=4))
    assert whole.status == 200 and json.loads(whole.body)["usage"]["completion_tokens"] == 4
    assert ask(port, COMPLETIONS, completion(LONG, max_tokens=1)).status == 200
    streamed = ask(port, CHAT, chat("a b c", max_tokens=5, stream=True))
    assert streamed.status == 200 and streamed.body.endswith(b"data: [DONE]\n\n")
    assert ask(port, "/v1/models", None, method="GET").status == 200
    assert sum(gateway.fleet.requests()) >= sum(before) + 3
    wrong = ask(port, COMPLETIONS, b"{")
    assert wrong.status == 400


@pytest.mark.parametrize("mode", ["NONE", "STREAMED"])
def test_a_mode_that_cannot_work_is_named_to_the_client_with_the_modes_that_do(gateway: Gateway, mode: str) -> None:
    port = in_modes(gateway, mode, "FULL_DUPLEX_STREAMED")
    answer = ask(port, COMPLETIONS, completion("a b c"))
    assert answer.status == 500
    assert f"request_body_mode {mode}: the endpoint picker needs FULL_DUPLEX_STREAMED, or BUFFERED" in answer.body.decode()
    assert ask(port, "/v1/models", None, method="GET").status == 200
