"""How answers pass through a real Envoy: what foreign code and metadata of plugins do to them."""

import json

import pytest

from tests.e2e.cluster import COMPLETIONS, Cluster, ask, completion, eventually
from tests.e2e.echo import HEAD, Json, gateway, picker_for, servers

FOREIGN = """
from epp.plugin import Parser, plugin
from epp.protocol.usage import ANSWER, AnswerHandling


class Scanner:
    usage = None
    pending = True

    def feed(self, chunk):
        raise RuntimeError("this scanner breaks")


@plugin("breaking-parser")
class Breaking(Parser):
    \"\"\"Reads any body. Its scanner breaks at the first piece of an answer.\"\"\"

    paths = ("/v1/foreign",)
    reads_usage = True
    keeps = (ANSWER,)

    def parse(self, request, path, body):
        request.model = request.target_model = "m"
        request[ANSWER] = AnswerHandling(Scanner)
"""
CONFIG = (
    HEAD
    + """plugins:
- type: breaking-parser
- {{type: file-discovery, parameters: {{path: {file}}}}}
dataLayer: {{discovery: {{pluginRef: file-discovery}}}}
requestHandler: {{parsers: [{{pluginRef: breaking-parser}}]}}
"""
)


def test_a_foreign_scanner_that_raises_cuts_off_no_answer_and_its_parser_is_named(cluster: Cluster) -> None:
    folder = cluster.directory / "plugins"
    folder.mkdir()
    (folder / "breaking.py").write_text(FOREIGN)
    with servers(1) as started:
        picker = picker_for(cluster, started, CONFIG, f"--plugin-path={folder}")
        port = gateway(cluster, picker.grpc)
        for prompt in ("short", "long " * 60_000):
            body = completion(prompt)
            answer = ask(port, "/v1/foreign", body)
            assert answer.status == 200 and answer.json()["body"].encode() == body
        labels = '{plugin_name="breaking-parser",plugin_type="breaking-parser"}'
        assert f"llm_d_epp_plugin_faults_total{labels} 2.0" in picker.page()


REPORTS = (
    HEAD
    + """plugins:
- type: request-attribute-reporter
  parameters:
    attributes: [{{key: {{name: cost, namespace: billing}}, expression: "usage.prompt_tokens + 2.0 * usage.completion_tokens"}}]
- {{type: file-discovery, parameters: {{path: {file}}}}}
dataLayer: {{discovery: {{pluginRef: file-discovery}}}}
"""
)


@pytest.mark.parametrize("stream", [False, True])
def test_the_gateway_gets_the_metadata_of_a_plugin_with_the_end_of_the_answer(cluster: Cluster, stream: bool) -> None:
    log = cluster.directory / "access.log"

    def logged(manager: Json, _all: Json) -> None:
        filter_ = manager["http_filters"][0]["typed_config"]
        filter_["metadata_options"] = {"receiving_namespaces": {"untyped": ["billing"]}}
        line = "%DYNAMIC_METADATA(billing:cost)% %BYTES_SENT%\n"
        kind = "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog"
        form = {"text_format_source": {"inline_string": line}}
        manager["access_log"] = [{"name": "file", "typed_config": {"@type": kind, "path": str(log), "log_format": form}}]

    fleet = cluster.fleet(1)
    picker = cluster.picker(fleet.file, workers=1, config_text=REPORTS.format(file=fleet.file))
    port = gateway(cluster, picker.grpc, logged)
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = ask(port, COMPLETIONS, completion("four words of prompt", max_tokens=3, **more))
    text = answer.body.decode()
    found = [json.loads(line) for line in text.replace("data: ", "").split("\n") if line.startswith("{")]
    usage = next(event["usage"] for event in reversed(found) if event.get("usage"))
    cost = usage["prompt_tokens"] + 2 * usage["completion_tokens"]
    assert eventually(lambda: log.exists() and log.read_text() == f"{cost} {len(answer.body)}\n"), log.read_text()
