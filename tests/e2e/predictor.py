"""A latency predictor that does as the test says: the sidecars' HTTP, in a thread of the test's process.

It predicts by a row's place: of every request's rows the first endpoint's is fast, all others are slow. What it was asked and
taught stands in `rows` and `entries`.
"""

import enum
import http.server
import json
import threading
from typing import Any, Self

FAST_MS, SLOW_MS, TOKEN_MS = 50.0, 5000.0, 10.0


class Mood(enum.Enum):
    """What comes of a question."""

    GOOD = "predictions"
    HANGING = "nothing, until the mood changes"
    BROKEN = "an error"
    RUDE = "the connection's end"


class Predictor:
    """Training and prediction server in one; use it as a context."""

    def __init__(self, servers: int) -> None:
        self.servers = servers  # a request's rows
        self.rows: list[list[dict[str, Any]]] = []
        self.entries: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self._mood = Mood.GOOD
        self._changed = threading.Event()
        server = self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        server.daemon_threads = True
        self._thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.url = f"http://127.0.0.1:{server.server_port}"

    @property
    def mood(self) -> Mood:
        return self._mood

    @mood.setter
    def mood(self, mood: Mood) -> None:
        self._mood = mood
        self._changed.set()
        self._changed = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.mood = Mood.GOOD
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """Status and what to say."""
        self.paths.append(path)
        if path == "/status":
            return 200, {"is_ready": True, "model_type": "xgboost", "quantile": 0.9}
        if path == "/add_training_data_bulk":
            self.entries += json.loads(body)["entries"]
            return 202, {"message": "accepted"}
        if path != "/predict/bulk/strict":
            return 404, {}
        rows = json.loads(body)["requests"]
        self.rows.append(rows)
        if self._mood is Mood.HANGING:
            self._changed.wait()
        if self._mood is Mood.BROKEN:
            return 503, {"detail": "no model yet"}
        predictions = [
            {
                "ttft_ms": SLOW_MS if number % self.servers else FAST_MS,
                "tpot_ms": TOKEN_MS,
                "model_type": "xgboost",
                "quantile": 0.9,
            }
            for number in range(len(rows))
        ]
        return 200, {"predictions": predictions, "total_requests": len(rows), "failed_predictions": 0}

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        predictor = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                if predictor.mood is Mood.RUDE and self.path.startswith("/predict"):
                    self.close_connection = True
                    return
                status, said = predictor.answer(self.path, body)
                text = json.dumps(said).encode()
                try:
                    self.send_response(status)
                    self.send_header("content-type", "application/json")
                    self.send_header("content-length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text)
                except OSError:  # who asked has left
                    self.close_connection = True

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                """The test's output is for tests."""

        return Handler
