"""Users of an inference gateway for locust: `locust -f loadtest/load/locustfile.py -H http://GATEWAY Chat Documents`.

Each kind of user is a class. Name the classes on the command line; without names all of them run:

    Chat        conversations that grow turn by turn; many share a few system prompts
    Documents   several questions about one long text
    Tenants     three tenants, one of them with a lower priority (by its objective); the largest has ten times as many users as the smallest
    Adapters    chats with the base model or one of its LoRA adapters; some adapters are more popular

At the end, a report shows for each task the time to the first token and between tokens, the hit rate of the servers' caches, the share
of each endpoint, and errors. locust's HTML report contains this report, too. The shares need a gateway that names the endpoint in a
response header, as the gateway of `make load` does. Refusals are counted as errors, by status and drop reason. Incomplete answers are
counted as errors, too. `loadtest/bursts.py` sends the same load in bursts.
"""

import json
import random
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

import locust.stats
from locust import FastHttpUser, constant_throughput, events, task

from loadtest.load.talk import SYSTEM_PROMPTS, document, system_prompt, words
from loadtest.load.task_report import TaskReport, inserted

PATH: Final = "/v1/chat/completions"
DROP_REASON: Final = "x-llm-d-request-dropped-reason"
SERVER: Final = "x-served-by"  # a response header of the demo's gateway: the model server's address
FAIRNESS: Final = "x-llm-d-inference-fairness-id"
OBJECTIVE: Final = "x-llm-d-inference-objective"
DATA: Final = b"data: "
DONE: Final = b"[DONE]"
TURNS_MAX: Final = 8
DOCUMENT_BYTES: Final = 60_000
TENANTS: Final = (("large", 10, ""), ("small", 1, ""), ("batch", 2, "batch"))  # fairness id, share of users, objective

locust.stats.CSV_STATS_INTERVAL_SEC = 0.2  # type: ignore[assignment]  # locust writes nothing to the file after the last interval


@events.init_command_line_parser.add_listener
def _options(parser: Any) -> None:
    group = parser.add_argument_group("users of the gateway")
    group.add_argument("--model", default="demo-model", help="the model to ask for", env_var="LOAD_MODEL")
    group.add_argument("--adapters", default="", help="LoRA adapters to ask for, separated by commas", env_var="LOAD_ADAPTERS")
    group.add_argument("--output-tokens", type=int, default=32, help="tokens of each answer", env_var="LOAD_OUTPUT_TOKENS")
    group.add_argument("--pace", type=float, default=0.5, help="requests per second of one user", env_var="LOAD_PACE")


@events.init.add_listener
def _report_at_the_end(environment: Any, **_more: Any) -> None:
    environment.tasks = TaskReport()

    @environment.events.quit.add_listener
    def _show(**_event: Any) -> None:
        print(f"\n{environment.tasks.text()}")
        name = getattr(environment.parsed_options, "html_file", None)
        if name and (page := Path(name)).exists():
            page.write_text(inserted(page.read_text(), environment.tasks.html()))


class GatewayUser(FastHttpUser):
    """The base class of all users: sends streamed chat completions and measures them."""

    abstract = True
    network_timeout = 120.0
    connection_timeout = 10.0

    def on_start(self) -> None:
        self.rng = random.Random(f"{type(self).__name__} {id(self)} {time.time_ns()}")
        self.options = self.environment.parsed_options

    def wait_time(self) -> float:
        waited: float = constant_throughput(self.options.pace)(self)
        return waited

    def ask(self, messages: list[dict[str, str]], *, name: str, model: str = "", headers: dict[str, str] | None = None) -> str:
        """Sends the request and reads the whole answer. Returns its text, or "" on failure."""
        body = {
            "model": model or self.options.model,
            "messages": messages,
            "max_tokens": self.options.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        figures = self.environment.tasks.of(name)
        figures.requests += 1
        start = time.perf_counter()
        with self.client.post(PATH, json=body, name=name, headers=headers, stream=True, catch_response=True) as response:
            response.request_meta["request_type"] = "chat"
            if response.status_code != 200:
                reason = (response.headers or {}).get(DROP_REASON, "") if response.status_code else "no answer"
                failure = f"{response.status_code} {reason}".strip()
                figures.errors[failure] += 1
                response.failure(failure)
                return ""
            if server := (response.headers or {}).get(SERVER):
                figures.endpoints[server] += 1
            pieces, times = [], []
            broken = ""
            try:
                for event in _events(response):
                    if usage := event.get("usage"):
                        prompt, cached = _cached(usage)
                        figures.prompt_tokens += prompt
                        figures.cached_tokens += cached
                    choices = event.get("choices")
                    text = choices[0].get("delta", {}).get("content") if choices else None
                    if text:
                        pieces.append(text)
                        times.append(time.perf_counter())
            except Broken as error:
                broken = str(error)
            end = time.perf_counter()
            response.request_meta["response_time"] = (end - start) * 1e3
            if broken or not times:
                failure = broken or "an answer without a token"
                figures.errors[failure] += 1
                response.failure(failure)
                return ""
        figures.first_token_s.append(times[0] - start)
        if len(times) > 1:
            figures.between_tokens_s.append((times[-1] - times[0]) / (len(times) - 1))
        return "".join(pieces)


def _cached(usage: dict[str, Any]) -> tuple[int, int]:
    """Returns the number of prompt tokens, and the number of cached ones among them. Returns zeros if the server does not report both."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return (usage["prompt_tokens"], cached) if cached is not None and "prompt_tokens" in usage else (0, 0)


class Broken(Exception):
    """Raised if a stream began and did not end properly. All errors of a kind have the same text, so that locust groups them."""


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a stream of server-sent events. Raises Broken."""
    is_whole = False
    try:
        while line := response.stream.readline(b"\n"):
            data = line.strip()
            if data == DATA + DONE:
                is_whole = True
            elif data.startswith(DATA):
                event = json.loads(data[len(DATA) :])
                if not isinstance(event, dict) or "error" in event:
                    raise Broken("200, then an error in the stream")
                yield event
    except (HTTPException, OSError) as cut:
        raise Broken("200, then the connection ended inside the stream") from cut
    except json.JSONDecodeError as wrong:
        raise Broken("200, then an event that is not JSON") from wrong
    if not is_whole:
        raise Broken("200, then a stream without [DONE]")


class Chat(GatewayUser):
    """A user who has one conversation of a few turns after the other."""

    weight = 4

    def on_start(self) -> None:
        super().on_start()
        self._begin()

    def _begin(self) -> None:
        content = system_prompt(self.rng.randrange(SYSTEM_PROMPTS))
        self._messages = [{"role": "system", "content": content}]

    @task
    def turn(self) -> None:
        self._messages.append({"role": "user", "content": words(self.rng, self.rng.randrange(20, 120))})
        answer = self.ask(self._messages, name="chat")
        self._messages.append({"role": "assistant", "content": answer})
        if not answer or len(self._messages) > 2 * TURNS_MAX:
            self._begin()


class Documents(GatewayUser):
    """A user who asks a few questions about a long text, then about the next text."""

    weight = 1

    def on_start(self) -> None:
        super().on_start()
        self._left = 0

    @task
    def question(self) -> None:
        if not self._left:
            self._text = document(self.rng.randrange(1_000), DOCUMENT_BYTES)
            self._left = self.rng.randrange(2, 6)
        self._left -= 1
        question = words(self.rng, 20)
        self.ask([{"role": "user", "content": f"{self._text}\n\n{question}"}], name="document")


class Tenants(GatewayUser):
    """A user of one of three tenants. In the statistics, the names of requests show the tenant."""

    weight = 2

    def on_start(self) -> None:
        super().on_start()
        names = [name for name, _, _ in TENANTS]
        self._tenant = self.rng.choices(names, [share for _, share, _ in TENANTS])[0]
        objective = next(objective for name, _, objective in TENANTS if name == self._tenant)
        self._headers = {FAIRNESS: self._tenant, **({OBJECTIVE: objective} if objective else {})}

    @task
    def message(self) -> None:
        messages = [{"role": "user", "content": words(self.rng, self.rng.randrange(50, 400))}]
        self.ask(messages, name=f"tenant {self._tenant}", headers=self._headers)


class Adapters(GatewayUser):
    """A user who chats with the base model or with an adapter. The n-th model of the list gets 1/n of the requests of the first."""

    weight = 1

    @task
    def message(self) -> None:
        adapters = [name for name in self.options.adapters.split(",") if name]
        models = [self.options.model, *adapters]
        model = self.rng.choices(models, [1 / (place + 1) for place in range(len(models))])[0]
        messages = [{"role": "user", "content": words(self.rng, self.rng.randrange(20, 200))}]
        self.ask(messages, name=f"model {model}", model=model)
