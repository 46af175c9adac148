"""Users of an inference gateway, for locust: `locust -f loadtest/locustfile.py -H http://GATEWAY Chat Documents`.

Each kind of user is a class, to be named on the command line (none named: all of them):

    Chat        conversations that grow turn by turn behind a few system prompts that many share
    Documents   several questions about one long text
    Tenants     three tenants of which one sends ten times as much, with priorities by objective
    Adapters    chats with the base model or one of its LoRA adapters, some asked for more often

Beside each request (type `chat`) locust shows the time to the first token (`first token`) and between tokens (`per token`). A refusal is
an error by its status and drop reason; an answer that was begun and is not whole is one too. `loadtest/bursts.py` is the same with
load that comes in bursts.
"""

import json
import random
import time
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any, Final

import locust.stats
from locust import FastHttpUser, constant_throughput, events, task

from loadtest.talk import SYSTEM_PROMPTS, document, system_prompt, words

PATH: Final = "/v1/chat/completions"
DROP_REASON: Final = "x-llm-d-request-dropped-reason"
FAIRNESS: Final = "x-llm-d-inference-fairness-id"
OBJECTIVE: Final = "x-llm-d-inference-objective"
DATA: Final = b"data: "
DONE: Final = b"[DONE]"
TURNS_MAX: Final = 8
DOCUMENT_BYTES: Final = 60_000
TENANTS: Final = (("large", 10, ""), ("small", 1, ""), ("batch", 2, "batch"))  # fairness id, share of users, objective

locust.stats.CSV_STATS_INTERVAL_SEC = 0.2  # type: ignore[assignment]  # what comes after the last time is missing in the file


@events.init_command_line_parser.add_listener
def _options(parser: Any) -> None:
    group = parser.add_argument_group("users of the gateway")
    group.add_argument("--model", default="demo-model", help="the model to ask for", env_var="LOAD_MODEL")
    group.add_argument("--adapters", default="", help="LoRA adapters to ask for, by commas", env_var="LOAD_ADAPTERS")
    group.add_argument("--output-tokens", type=int, default=32, help="of each answer", env_var="LOAD_OUTPUT_TOKENS")
    group.add_argument("--pace", type=float, default=0.5, help="requests a user begins per second", env_var="LOAD_PACE")


class GatewayUser(FastHttpUser):
    """What all users share: one streamed chat completion, measured."""

    abstract = True
    network_timeout = 120.0
    connection_timeout = 10.0

    def on_start(self) -> None:
        self.rng = random.Random(f"{type(self).__name__} {id(self)} {time.time_ns()}")
        self.options = self.environment.parsed_options

    def wait_time(self) -> float:
        waited: float = constant_throughput(self.options.pace)(self)
        return waited

    def ask(
        self, messages: list[dict[str, str]], *, name: str, model: str = "", headers: dict[str, str] | None = None
    ) -> str:
        """Asks and reads the whole answer; its text, empty if there was none."""
        body = {
            "model": model or self.options.model,
            "messages": messages,
            "max_tokens": self.options.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start = time.perf_counter()
        with self.client.post(
            PATH, json=body, name=name, headers=headers, stream=True, catch_response=True
        ) as response:
            response.request_meta["request_type"] = "chat"
            if response.status_code != 200:
                reason = (response.headers or {}).get(DROP_REASON, "") if response.status_code else "no answer"
                response.failure(f"{response.status_code} {reason}".strip())
                return ""
            pieces, times = [], []
            broken = ""
            try:
                for event in _events(response):
                    choices = event.get("choices")
                    text = choices[0].get("delta", {}).get("content") if choices else None
                    if text:
                        pieces.append(text)
                        times.append(time.perf_counter())
            except Broken as found:
                broken = str(found)
            end = time.perf_counter()
            response.request_meta["response_time"] = (end - start) * 1e3
            if broken or not times:
                response.failure(broken or "an answer without a token")
                return ""
        self._measured("first token", name, times[0] - start)
        if len(times) > 1:
            self._measured("per token", name, (times[-1] - times[0]) / (len(times) - 1))
        return "".join(pieces)

    def _measured(self, kind: str, name: str, seconds: float) -> None:
        events.request.fire(
            request_type=kind, name=name, response_time=seconds * 1e3, response_length=0, exception=None, context={}
        )


class Broken(Exception):
    """A stream that was begun and did not end as it should; the text is the same for all of a kind."""


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events. Raises Broken."""
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
        raise Broken("200, then an event that is no JSON") from wrong
    if not is_whole:
        raise Broken("200, then a stream without [DONE]")


class Chat(GatewayUser):
    """A conversation of a few turns, then another one."""

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
    """A long text, and some questions about it."""

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
    """One of three tenants; who it is shows in the statistics."""

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
    """The base model or an adapter; the n-th adapter is asked for 1/n as often as the first."""

    weight = 1

    @task
    def message(self) -> None:
        adapters = [name for name in self.options.adapters.split(",") if name]
        models = [self.options.model, *adapters]
        model = self.rng.choices(models, [1 / (place + 1) for place in range(len(models))])[0]
        messages = [{"role": "user", "content": words(self.rng, self.rng.randrange(20, 200))}]
        self.ask(messages, name=f"model {model}", model=model)
