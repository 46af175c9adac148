"""How answers pass through a real Envoy: what foreign code and metadata of plugins do to them."""

from tests.e2e.cluster import Cluster, ask, completion
from tests.e2e.echo import HEAD, gateway, picker_for, servers

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
