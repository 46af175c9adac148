"""`epp explain`, offline and with the page of a picker."""

import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from epp.request.paths import inferred_path
from shm import observe
from tests.workers.authority import Authority
from workers.cli import main

ENDPOINTS = """\
endpoints:
- {name: a, address: 10.0.0.1, port: "8000", values: {waiting_requests: 3, kv_cache_usage: 0.5}, inFlight: 4, cached: 0.5}
- {name: b, address: 10.0.0.2, port: "8000", values: {waiting_requests: 0, kv_cache_usage: 0.2}}
- {name: c, address: 10.0.0.3, port: "8000"}
"""
TOKEN_LOAD = f"--config-file={Path(__file__).parents[3] / 'deploy/config/token-load.yaml'}"
SHORT = json.dumps({"model": "m", "prompt": "x" * 3000})


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["explain", *args])


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    endpoints, request = tmp_path / "endpoints.yaml", tmp_path / "request.json"
    endpoints.write_text(ENDPOINTS)
    request.write_text(SHORT)
    return f"--endpoints-file={endpoints}", f"--request={request}"


def test_offline_a_table_shows_scores_times_weights_and_the_margin(files: tuple[str, str]) -> None:
    # tokens 256 - [366, 750, 750] / 1024, queue [0, 1, 0.5 (mean of the fresh)], running 1, kv 1 - [0.5, 0.2, 0.35],
    # prefix [384 / 749, 0, 0].
    result = run(*files, TOKEN_LOAD)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[1].startswith("model m  flow default-flow  priority 0")
    assert lines[2] == "sent to 10.0.0.2:8000 by profile 'default'"
    rows = [line.split() for line in lines if line[2:3] in ("*", " ") and "→" in line]
    assert rows[0][1] == "b"
    assert "max-score-picker picks b, 0.412 above a" in result.output


def test_offline_json_has_the_format_of_the_picker_s_page(files: tuple[str, str]) -> None:
    (decision,) = json.loads(run(*files, TOKEN_LOAD, "--json").output)["decisions"]
    (profile,) = decision["profiles"]
    assert [(c["endpoint"], c["state"], c["total"]) for c in profile["candidates"]] == [
        ("b", "fresh", 258.0676),
        ("a", "fresh", 257.6553),
        ("c", "unknown", 257.4176),
    ]


def test_offline_the_configuration_file_decides(files: tuple[str, str], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("plugins:\n- {type: prefix-cache-scorer}\n")
    assert "picks a, 0.513 above" in run(*files, f"--config-file={config}").output


def test_offline_the_fairness_id_names_the_tenant_because_no_gateway_vouches_for_one(files: tuple[str, str], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("tenants: {from: [{apiKey: {header: authorization, file: keys}}]}\nplugins:\n- {type: prefix-cache-scorer}\n")
    named = run(*files, f"--config-file={config}", "--header=x-llm-d-inference-fairness-id: acme")
    assert (named.exit_code, "flow acme" in named.output) == (0, True)
    assert "flow unknown" in run(*files, f"--config-file={config}").output


def test_text_from_a_client_does_not_control_the_terminal(files: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text(json.dumps({"model": "m\x1b[2J\nsent to", "prompt": "x"}))
    result = run(*files, "--header=x-request-id: \x9b2J")
    assert r"model m\u001b[2J\nsent to  flow" in result.output and result.output.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("x-llm-d-model-name-rewrite: other", "model m as other  flow default-flow"),
        ("x-llm-d-inference-fairness-id: blue", "model m  flow blue"),
        ("prefer: if-available", "refused: not-cached"),
    ],
)
def test_offline_request_headers_have_their_effect(files: tuple[str, str], header: str, message: str) -> None:
    assert message in run(*files, f"--header={header}").output


def test_offline_objectives_and_rewrites_of_a_folder_are_applied(files: tuple[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    folder.mkdir()
    head = "apiVersion: llm-d.ai/v1alpha2\nkind: Inference"
    rule = "{matches: [{model: {value: m}}], targets: [{modelRewrite: canary}]}"
    rewrite = f"{head}ModelRewrite\nmetadata: {{name: r}}\nspec: {{rules: [{rule}]}}\n"
    (folder / "a.yaml").write_text(f"{head}Objective\nmetadata: {{name: gold}}\nspec: {{priority: 9}}\n---\n{rewrite}")
    arguments = (*files, f"--objects-dir={folder}", "--header=x-llm-d-inference-objective: gold")
    assert "model m as canary  flow default-flow  priority 9" in run(*arguments).output
    (folder / "a.yaml").write_text("kind: {")
    invalid = run(*arguments)
    assert invalid.exit_code == 78 and "a.yaml:2: neither YAML nor JSON" in invalid.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("endpoints:\n- {name: a}\n", "no address"),
        (ENDPOINTS.replace("waiting_requests: 3", "waiting_request: 3"), "did you mean 'waiting_requests'"),
        (ENDPOINTS.replace("cached: 0.5", "cached: 2"), "endpoints.yaml:2"),
        (ENDPOINTS.replace("inFlight: 4", "inFlight: -1"), "endpoints.yaml:2"),
    ],
)
def test_an_invalid_endpoints_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "endpoints.yaml").write_text(text)
    (tmp_path / "r.json").write_text(SHORT)
    result = run(f"--endpoints-file={tmp_path / 'endpoints.yaml'}", f"--request={tmp_path / 'r.json'}")
    assert result.exit_code == 78 and message in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ENDPOINTS + "- {name: a, address: 10.0.0.4, port: '8000'}\n", ":5: endpoint 'a' is given again, first in line 2"),
        (ENDPOINTS + "---\n" + ENDPOINTS, ":6: a second document"),
    ],
)
def test_endpoints_that_contradict_each_other_are_refused(files: tuple[str, str], tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "endpoints.yaml").write_text(text)
    result = run(*files)
    assert (result.exit_code, message in result.output) == (78, True), result.output


def test_an_unreadable_request_is_explained_as_refused(files: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    result = run(files[0], f"--request={tmp_path / 'bad.json'}")
    assert result.exit_code == 0 and "refused: invalid-body" in result.output


def test_a_long_request_is_read_to_its_end(files: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "long.json").write_text(json.dumps({"model": "m", "prompt": "x" * (5 << 20)}))
    result = run(files[0], f"--request={tmp_path / 'long.json'}")
    assert result.exit_code == 0 and "sent to" in result.output


@pytest.mark.parametrize(
    "args",
    [
        ("--request=x",),
        ("--endpoints-file=x",),
        ("--last", "--request-id=a"),
        ("--url=ftp://x",),
        ("--header=x",),
        ("--id=x",),
        ("receipt", "--last"),
        ("receipt", "--trace=x", "--id=1"),
    ],
)
def test_flags_that_do_not_fit_together_are_a_usage_error(args: tuple[str, ...]) -> None:
    if args == ("--header=x",):
        args = ("--header=x", "--request=-", "--endpoints-file=x")
    assert run(*args).exit_code == 2


class Page(http.server.BaseHTTPRequestHandler):
    answer = (200, b'{"decisions":[]}\n')
    recorded = b'{"folder":"","why":"--record-dir is none"}\n'
    paths: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.paths.append(self.path)
        status, body = (200, self.recorded) if "/recorded" in self.path else self.answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def picker() -> Iterator[str]:
    Page.paths.clear()
    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_running_picker_returns_the_newest_decision_or_that_of_one_request(picker: str, files: tuple[str, str]) -> None:
    Page.answer = (200, run(*files, "--json").output.encode())
    assert "picks b" in run(f"--url={picker}", "--last").output
    assert "picks b" in run(f"--url={picker}", "--request-id=a b").output
    assert Page.paths == ["/debug/decisions?n=1", "/debug/decisions?request_id=a+b"]


@pytest.mark.parametrize("options", [("--at=10m",), ("--flow=default-flow",), ("--endpoint=b",), ("--at=1s", "--endpoint=b")])
def test_what_is_not_recorded_is_looked_for_in_what_workers_remember(picker: str, files: tuple[str, str], options: tuple[str, ...]) -> None:
    Page.answer = (200, run(*files, "--json").output.encode())
    result = run(f"--url={picker}", *options)
    assert "picks b" in result.output
    missing = run(f"--url={picker}", *options, "--endpoint=elsewhere")
    assert missing.exit_code == 1
    assert "no worker remembers a decision" in missing.output and "--record-dir is none" in missing.output


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, b'{"decisions":[]}'), "no decision was made yet"),
        ((403, b"loopback only\n"), "loopback only"),
        ((200, b"no json"), "--url must name a picker's metrics port"),
    ],
)
def test_an_error_of_the_picker_s_page_is_shown(picker: str, answer: tuple[int, bytes], message: str) -> None:
    Page.answer = answer
    result = run(f"--url={picker}")
    assert result.exit_code == 1 and message in result.output


def test_the_port_may_be_given_as_host_and_port(picker: str, files: tuple[str, str]) -> None:
    Page.answer = (200, run(*files, "--json").output.encode())
    assert "picks b" in run(f"--url={picker.removeprefix('http://')}").output


def test_without_a_url_the_picker_is_found_as_epp_top_finds_it(
    picker: str, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Page.answer = (200, run(*files, "--json").output.encode())
    seen = observe.Seen("p", 1, {"metrics": int(picker.rpartition(":")[2])}, (), 0.0, observe.Life.RUNNING)
    monkeypatch.setattr(observe, "instances", lambda _run_dir: [seen])
    assert "picks b" in run("--instance=p").output
    monkeypatch.undo()
    result = run(f"--run-dir={tmp_path}")
    assert result.exit_code == 1
    assert f"no instance in {tmp_path}: start a picker" in result.output and "--url" in result.output


def test_a_port_with_tls_is_verified_with_the_given_ca(files: tuple[str, str], tmp_path: Path, picker: str) -> None:
    authority = Authority()
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    pair = authority.pair()
    (tmp_path / "pair.pem").write_bytes(pair.key + pair.chain)
    Page.answer = (200, run(*files, "--json").output.encode())
    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "pair.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        port = f"localhost:{server.server_port}"
        try:
            assert "picks b" in run(f"--url={port}", f"--ca-file={tmp_path / 'ca.pem'}").output
            assert "is not trusted" in run(f"--url=https://{port}").output
        finally:
            server.shutdown()
            thread.join()
    assert run(f"--url={picker}", "--ca-file=x").exit_code == 2
    assert "--ca-file /none: No such file" in run("--url=localhost:1", "--ca-file=/none").output


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"prompt": "x"}, "/v1/completions"),
        ({"messages": []}, "/v1/chat/completions"),
        ({"messages": [], "system": "be brief"}, "/v1/messages"),
        ({"input": "x"}, "/v1/responses"),
        ({"input": "x", "encoding_format": "float"}, "/v1/embeddings"),
        ([], "/v1/completions"),
    ],
)
def test_the_path_of_a_body_is_inferred_from_its_fields(body: object, path: str) -> None:
    assert inferred_path(json.dumps(body).encode()) == path


def test_no_line_is_wider_than_100_columns_and_each_part_names_the_endpoints(files: tuple[str, str]) -> None:
    assert max(map(len, run(*files).output.splitlines())) <= 100
    lines = run(*files, TOKEN_LOAD).output.splitlines()
    assert max(map(len, lines)) <= 100
    parts = [line for line in lines if line.split()[:1] == ["endpoint"]]
    assert len(parts) > 1 and any("prefix-cache-scorer" in line for line in parts)


def test_a_missing_picker_is_an_error_that_names_the_flag() -> None:
    result = run("--url=http://127.0.0.1:1")
    assert result.exit_code == 1
    url = "http://127.0.0.1:1/debug/decisions?n=1"
    assert result.output == f"Error: {url}: Connection refused; --url must name a picker's metrics port\n"


SNEAKY = """\
from epp.data import Datum
from epp.plugin import Scorer, plugin

@plugin("sneaky-offline-scorer")
class Sneaky(Scorer):
    def score(self, request, candidates, profile):
        note = Datum("not-declared", str, "nothing")
        request[note] = "something"
        return candidates.ones() if request[note] == "nothing" else candidates.zeros()
"""


def test_offline_a_foreign_plugin_may_use_only_declared_data_as_in_workers(files: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "sneaky.py").write_text(SNEAKY)
    config = tmp_path / "config.yaml"
    config.write_text("plugins:\n- {type: sneaky-offline-scorer}\n")
    result = run(*files, f"--config-file={config}", f"--plugin-path={tmp_path / 'plugins'}", "--json")
    assert result.exit_code == 0, result.output
    (profile,) = json.loads(result.output)["decisions"][0]["profiles"]
    assert {candidate["total"] for candidate in profile["candidates"]} == {1.0}


BROKEN = """\
from epp.plugin import Filter, plugin

@plugin("NAME")
class Broken(Filter):
    def keep(self, request, candidates, profile):
        return RESULT
"""


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("[0]", "returned shape (1,) of int64 for 3 candidates; return one boolean per candidate"),
        ("[0, 1]", "returned shape (2,) of int64 for 3 candidates"),
        ("[True]", "returned shape (1,) of bool for 3 candidates"),
        ("None", "of object for 3 candidates"),
        ("1 / 0", "ZeroDivisionError: division by zero ("),
        ("[True, False, True]", ""),
    ],
)
def test_offline_a_failing_plugin_is_named_with_its_fault_and_without_a_stack_trace(
    files: tuple[str, str], tmp_path: Path, result: str, message: str
) -> None:
    name = f"broken-{tmp_path.name}"
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "broken.py").write_text(BROKEN.replace("NAME", name).replace("RESULT", result))
    config = tmp_path / "config.yaml"
    config.write_text(f"plugins:\n- {{type: {name}}}\n")
    found = run(*files, f"--config-file={config}", f"--plugin-path={tmp_path / 'plugins'}")
    assert found.exit_code == (1 if message else 0), found.output
    if message:
        assert found.output.startswith(f"Error: plugin '{name}' fails: ")
    assert message in found.output
