"""Simulates a latency predictor: the HTTP server of the sidecars, in a thread of the test's process, under the control of the test.

It predicts by position: in the rows of one request, the first endpoint is fast, and all others are slow. `rows` has the prediction
requests that it received, `entries` the training data.
"""

import enum
import http.server
import json
import threading
from typing import Any, Self

FAST_MS, SLOW_MS, TOKEN_MS = 50.0, 5000.0, 10.0


class Behavior(enum.Enum):
    """How the predictor answers a prediction request."""

    GOOD = "predictions"
    HANGING = "no answer until the behavior changes"
    BROKEN = "an error"
    CLOSING = "a closed connection"


class Predictor:
    """Training and prediction server in one. Use it as a context manager."""

    def __init__(self, servers: int) -> None:
        self.servers = servers  # rows per request
        self.rows: list[list[dict[str, Any]]] = []
        self.entries: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self._behavior = Behavior.GOOD
        self._changed = threading.Event()
        server = self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        server.daemon_threads = True
        self._thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.url = f"http://127.0.0.1:{server.server_port}"

    @property
    def behavior(self) -> Behavior:
        return self._behavior

    @behavior.setter
    def behavior(self, behavior: Behavior) -> None:
        self._behavior = behavior
        self._changed.set()
        self._changed = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.behavior = Behavior.GOOD
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """Returns the status and the JSON answer to a request."""
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
        if self._behavior is Behavior.HANGING:
            self._changed.wait()
        if self._behavior is Behavior.BROKEN:
            return 503, {"detail": "no model yet"}
        predictions = [
            {"ttft_ms": SLOW_MS if number % self.servers else FAST_MS, "tpot_ms": TOKEN_MS, "model_type": "xgboost", "quantile": 0.9}
            for number in range(len(rows))
        ]
        return 200, {"predictions": predictions, "total_requests": len(rows), "failed_predictions": 0}

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        predictor = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                if predictor.behavior is Behavior.CLOSING and self.path.startswith("/predict"):
                    self.close_connection = True
                    return
                status, answer = predictor.answer(self.path, body)
                text = json.dumps(answer).encode()
                try:
                    self.send_response(status)
                    self.send_header("content-type", "application/json")
                    self.send_header("content-length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text)
                except OSError:  # the picker has closed the connection
                    self.close_connection = True

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                """Keeps the test's output clean."""

        return Handler
