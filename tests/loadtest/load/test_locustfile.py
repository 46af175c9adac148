"""The locust users, each in a separate process: locust replaces the sockets and threads of the process that imports it."""

import csv
import http.server
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOKENS = 4
USAGE = {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 10}}
TIMEOUT_S = 60.0
REQUESTS = 16

PIECES = """
import json, types
from loadtest.load import locustfile, bursts

class Lines:
    def __init__(self, data):
        self.lines = data.splitlines(keepends=True)
    def readline(self, end):
        return self.lines.pop(0) if self.lines else b""

text = b'data: {"a": 1}\\n\\n: a comment\\ndata: {"b": [2]}\\r\\n\\ndata: [DONE]\\n\\n'
events = list(locustfile._events(types.SimpleNamespace(stream=Lines(text))))

def users(at, run_time=None, peak=30):
    shape = bursts.Bursts()
    options = types.SimpleNamespace(run_time=run_time, num_users=peak)
    shape.runner = types.SimpleNamespace(environment=types.SimpleNamespace(parsed_options=options))
    shape.get_run_time = lambda: at
    tick = shape.tick()
    return tick and tick[0]

print(json.dumps({
    "events": events,
    "bursts": [users(at) for at in (0, 4.9, 5.1, 19.9, 20.1)],
    "one": users(10, peak=1),
    "unset": users(0, peak=None),
    "over": users(31, run_time=30),
    "kinds": sorted(c.__name__ for c in vars(locustfile).values()
                    if isinstance(c, type) and issubclass(c, locustfile.GatewayUser) and not c.abstract),
}))
"""


@pytest.fixture(scope="module")
def pieces() -> Any:
    """The results of the parts that need no gateway."""
    done = subprocess.run([sys.executable, "-c", PIECES], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_events_of_a_stream_are_its_json_objects_without_comments_and_done(pieces: Any) -> None:
    assert pieces["events"] == [{"a": 1}, {"b": [2]}]


def test_bursts_have_all_users_for_a_quarter_of_each_period_and_a_third_otherwise(pieces: Any) -> None:
    assert pieces["bursts"] == [30, 30, 10, 10, 30]
    assert (pieces["one"], pieces["unset"], pieces["over"]) == (1, 30, None)


def test_the_module_has_the_documented_kinds_of_users(pieces: Any) -> None:
    assert pieces["kinds"] == ["Adapters", "Chat", "Documents", "Tenants"]


class Gateway(http.server.ThreadingHTTPServer):
    """Answers a chat completion with a few tokens, or refuses it if `refuse` is set. Keeps the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.refuse: tuple[int, str] | None = None
        self.tokens = TOKENS
        self.end = "data: [DONE]\n\n"  # the end of a stream
        self.missing_bytes = 0  # bytes that the answer announces but does not send
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []


class Answering(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Gateway

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append(({name.lower(): value for name, value in self.headers.items()}, body))
        if self.server.refuse:
            status, reason = self.server.refuse
            self._answer(status, b"", {"x-llm-d-request-dropped-reason": reason})
            return
        events = [{"choices": [{"delta": {"content": "word "}}]}] * self.server.tokens + [{"choices": [], "usage": USAGE}]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + self.server.end
        self._answer(200, text.encode(), {"content-type": "text/event-stream", "x-served-by": "10.0.0.7:80"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body) + self.server.missing_bytes)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = bool(self.server.missing_bytes)

    def log_message(self, format: str, *args: Any) -> None:
        """Silences the log."""


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    server = Gateway()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def locust(gateway: Gateway, directory: Path, *arguments: str) -> tuple[int, dict[str, dict[str, str]], list[str]]:
    """Runs locust until the gateway has got `REQUESTS`. Returns its exit code, the statistics by type and name, and the errors."""
    url = f"http://127.0.0.1:{gateway.server_address[1]}"
    # A shell that starts the tests in the background lets them ignore SIGINT; locust must not inherit that.
    command = [
        "env",
        "--default-signal=INT",
        sys.executable,
        "-m",
        "locust",
        "-f",
        str(ROOT / "loadtest/load/locustfile.py"),
        "-H",
        url,
        "--headless",
    ]
    command += ["--only-summary", "--csv", str(directory / "run"), "-u", "3", "-r", "100", "--pace", "4"]
    wanted = len(gateway.requests) + REQUESTS
    with subprocess.Popen([*command, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + TIMEOUT_S
        while len(gateway.requests) < wanted and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        try:
            code = run.wait(TIMEOUT_S)
        finally:
            run.kill()
    with (directory / "run_stats.csv").open() as file:
        rows = {f"{row['Type']} {row['Name']}": row for row in csv.DictReader(file)}
    with (directory / "run_failures.csv").open() as file:
        return code, rows, [row["Error"] for row in csv.DictReader(file)]


def test_a_chat_grows_after_a_system_prompt_and_only_its_requests_are_in_the_statistics(gateway: Gateway, tmp_path: Path) -> None:
    code, rows, errors = locust(gateway, tmp_path, "Chat")
    assert (code, errors) == (0, [])
    count = int(rows["chat chat"]["Request Count"])
    assert count >= 3
    assert set(rows) == {"chat chat", " Aggregated"}  # times of tokens are no requests
    assert int(rows[" Aggregated"]["Request Count"]) == count
    roles = max(([message["role"] for message in body["messages"]] for _, body in gateway.requests), key=len)
    assert roles[:4] == ["system", "user", "assistant", "user"]
    assert all(body["stream"] for _, body in gateway.requests)


def test_the_html_report_has_hit_rate_share_per_endpoint_and_errors_of_each_task(gateway: Gateway, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert locust(gateway, tmp_path, "--html", str(page), "Chat", "Documents")[0] == 0
    text = page.read_text()
    assert "<td>chat</td>" in text and "<td>document</td>" in text
    assert "<td>25.0%</td>" in text and "10.0.0.7:80 100.0%" in text
    gateway.refuse = (429, "saturated")
    locust(gateway, tmp_path, "--html", str(page), "Documents")
    assert " × 429 saturated</td>" in page.read_text()


def test_a_refusal_is_an_error_with_its_status_and_reason(gateway: Gateway, tmp_path: Path) -> None:
    gateway.refuse = (429, "saturated")
    code, _, errors = locust(gateway, tmp_path, "Tenants")
    assert code == 1
    assert errors and all("429 saturated" in error for error in errors)


def test_an_answer_without_a_token_is_an_error(gateway: Gateway, tmp_path: Path) -> None:
    gateway.tokens = 0
    code, _, errors = locust(gateway, tmp_path, "Documents")
    assert code == 1
    assert errors and all("without a token" in error for error in errors)


@pytest.mark.parametrize(
    ("end", "missing_bytes", "error"),
    [
        ("", 9, "the connection ended inside the stream"),
        ("", 0, "a stream without [DONE]"),
        ('data: {"error": {"code": 500}}\n\ndata: [DONE]\n\n', 0, "an error in the stream"),
        ("data: {\n\n", 0, "an event that is not JSON"),
    ],
)
def test_an_incomplete_answer_is_an_error_and_no_success(
    gateway: Gateway, tmp_path: Path, end: str, missing_bytes: int, error: str
) -> None:
    gateway.end, gateway.missing_bytes = end, missing_bytes
    code, rows, errors = locust(gateway, tmp_path, "Chat")
    assert code == 1
    assert errors and all(error in text for text in errors)
    assert int(rows["chat chat"]["Failure Count"]) == int(rows["chat chat"]["Request Count"]) > 0


def test_tenants_send_their_fairness_ids_and_adapters_are_requested_by_name(gateway: Gateway, tmp_path: Path) -> None:
    locust(gateway, tmp_path, "-u", "8", "Tenants")
    assert {headers["x-llm-d-inference-fairness-id"] for headers, _ in gateway.requests} <= {"large", "small", "batch"}
    gateway.requests.clear()
    locust(gateway, tmp_path, "-u", "8", "--adapters", "lora-a,lora-b", "--model", "base", "Adapters")
    models = {body["model"] for _, body in gateway.requests}
    assert "base" in models and models <= {"base", "lora-a", "lora-b"}
