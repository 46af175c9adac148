"""The locust users, in processes of their own: locust replaces sockets and threads of the process that imports it."""

import csv
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 4
TIMEOUT_S = 60.0

PIECES = """
import json, types
from loadtest import locustfile, bursts

class Lines:
    def __init__(self, data):
        self.lines = data.splitlines(keepends=True)
    def readline(self, end):
        return self.lines.pop(0) if self.lines else b""

said = b'data: {"a": 1}\\n\\n: a comment\\ndata: {"b": [2]}\\r\\n\\ndata: [DONE]\\n\\n'
events = list(locustfile._events(types.SimpleNamespace(stream=Lines(said))))

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
    """What the parts that need no gateway return."""
    done = subprocess.run(
        [sys.executable, "-c", PIECES], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_events_of_a_stream_are_its_json_objects_without_comments_and_the_end(pieces: Any) -> None:
    assert pieces["events"] == [{"a": 1}, {"b": [2]}]


def test_bursts_have_all_users_for_a_quarter_of_each_period_and_a_third_of_them_otherwise(pieces: Any) -> None:
    assert pieces["bursts"] == [30, 30, 10, 10, 30]
    assert (pieces["one"], pieces["unset"], pieces["over"]) == (1, 30, None)


def test_every_kind_of_user_that_the_text_names_is_there(pieces: Any) -> None:
    assert pieces["kinds"] == ["Adapters", "Chat", "Documents", "Tenants"]


class Gateway(http.server.ThreadingHTTPServer):
    """Answers a chat completion with a few tokens, or refuses it as it is told; keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.refuse: tuple[int, str] | None = None
        self.tokens = TOKENS
        self.end = "data: [DONE]\n\n"  # of a stream
        self.missing_bytes = 0  # that were announced
        self.asked: list[tuple[dict[str, str], dict[str, Any]]] = []


class Answering(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Gateway

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(({name.lower(): value for name, value in self.headers.items()}, body))
        if self.server.refuse:
            status, reason = self.server.refuse
            self._answer(status, b"", {"x-llm-d-request-dropped-reason": reason})
            return
        events = [{"choices": [{"delta": {"content": "word "}}]}] * self.server.tokens + [{"choices": [], "usage": {}}]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + self.server.end
        self._answer(200, text.encode(), {"content-type": "text/event-stream"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body) + self.server.missing_bytes)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = bool(self.server.missing_bytes)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


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
    """Runs for two seconds; the exit code, the statistics by type and name, and the errors."""
    url = f"http://127.0.0.1:{gateway.server_address[1]}"
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest/locustfile.py"), "-H", url, "--headless"]
    command += ["--only-summary", "--csv", str(directory / "run"), "-u", "3", "-r", "100", "-t", "2s", "--pace", "4"]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    with (directory / "run_stats.csv").open() as file:
        rows = {f"{row['Type']} {row['Name']}": row for row in csv.DictReader(file)}
    with (directory / "run_failures.csv").open() as file:
        return done.returncode, rows, [row["Error"] for row in csv.DictReader(file)]


def test_a_chat_grows_behind_a_system_prompt_and_its_first_token_and_time_per_token_are_measured(
    gateway: Gateway, tmp_path: Path
) -> None:
    code, rows, errors = locust(gateway, tmp_path, "Chat")
    assert (code, errors) == (0, [])
    count = int(rows["chat chat"]["Request Count"])
    assert count >= 3
    assert {int(rows[f"{kind} chat"]["Request Count"]) for kind in ("first token", "per token")} == {count}
    roles = max(([message["role"] for message in body["messages"]] for _, body in gateway.asked), key=len)
    assert roles[:4] == ["system", "user", "assistant", "user"]
    assert all(body["stream"] for _, body in gateway.asked)


def test_a_refusal_is_an_error_by_its_status_and_reason(gateway: Gateway, tmp_path: Path) -> None:
    gateway.refuse = (429, "saturated")
    code, rows, errors = locust(gateway, tmp_path, "Tenants")
    assert code == 1
    assert errors and all("429 saturated" in error for error in errors)
    assert not any(name.startswith("first token") for name in rows)


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
        ("data: {\n\n", 0, "an event that is no JSON"),
    ],
)
def test_an_answer_that_ends_as_it_should_not_is_an_error_and_no_first_token_is_counted(
    gateway: Gateway, tmp_path: Path, end: str, missing_bytes: int, error: str
) -> None:
    gateway.end, gateway.missing_bytes = end, missing_bytes
    code, rows, errors = locust(gateway, tmp_path, "Chat")
    assert code == 1
    assert errors and all(error in said for said in errors)
    assert int(rows["chat chat"]["Failure Count"]) == int(rows["chat chat"]["Request Count"]) > 0
    assert not any(name.startswith("first token") for name in rows)


def test_tenants_say_who_they_are_and_adapters_are_asked_for_by_name(gateway: Gateway, tmp_path: Path) -> None:
    locust(gateway, tmp_path, "-u", "8", "Tenants")
    assert {headers["x-llm-d-inference-fairness-id"] for headers, _ in gateway.asked} <= {"large", "small", "batch"}
    gateway.asked.clear()
    locust(gateway, tmp_path, "-u", "8", "--adapters", "lora-a,lora-b", "--model", "base", "Adapters")
    models = {body["model"] for _, body in gateway.asked}
    assert "base" in models and models <= {"base", "lora-a", "lora-b"}
