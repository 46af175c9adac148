"""`epp doctor --kv-events`: connects to one endpoint as the picker does, reads some KV events, or says what is wrong."""

import socket
import time
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import click

from epp.config.lint import DEFAULT_SURROUNDINGS
from epp.plugins.producers._precise_params import PORT as EVENTS_PORT
from epp.plugins.producers.precise_prefix import kv_settings
from epp.plugins.producers.tokenizer import Tokens
from workers.cli import missing
from workers.cli.configuration import load_text, read_file, shown_path
from workers.cli.kv_diagnosis import ExpectedEvents, Heard, shown
from workers.cli.output import echo
from workers.host.exit_codes import ExitCode

if TYPE_CHECKING:
    from workers.supervisor.kv_events.sockets import ReplayRequest, Subscription

CONNECT_S = 3.0
HANDSHAKE_S = 3.0
REPLAY_S = 3.0
LOOK_MS = 50
TOPIC = "kv@"


class Trouble(Exception):
    """Raised if the KV events of the endpoint cannot be followed. The text says why, and what to do."""


class AskedEvents(NamedTuple):
    """The options of the command. If an option is None, the value of the configuration is used."""

    topic: str | None
    block_tokens: int | None
    model: str | None
    replay_port: int | None
    events: int
    timeout_s: float


def follow(address: str, config_file: str, asked: AskedEvents) -> int:
    """Connects to an endpoint's event socket, reads some KV events, and prints them, or prints what is wrong. Returns the exit code."""
    port, replay, wanted = EVENTS_PORT, 0, ExpectedEvents(topic=TOPIC, events=asked.events)
    if config_file:
        port, replay, wanted = _configured(config_file, asked.events)
    wanted = ExpectedEvents(
        topic=wanted.topic if asked.topic is None else asked.topic,
        block_tokens=wanted.block_tokens if asked.block_tokens is None else asked.block_tokens,
        model=wanted.model if asked.model is None else asked.model,
        events=asked.events,
    )
    host, port = _parts(address, port)
    try:
        heard = _read(host, port, replay if asked.replay_port is None else asked.replay_port, wanted, asked.timeout_s)
    except Trouble as trouble:
        echo(f"problem: {trouble}", err=True)
        return ExitCode.FAULT
    problems = heard.problems()
    for problem in problems:
        echo(f"problem: {problem}", err=True)
    echo(heard.summary())
    return ExitCode.FAULT if problems else ExitCode.OK


def _configured(file: str, events: int) -> tuple[int, int, ExpectedEvents]:
    """Reads a configuration. Returns the event port, the replay port, and the picker's expectations of the events."""
    config = load_text(read_file(file), shown_path(file), allow_experimental=True, surroundings=DEFAULT_SURROUNDINGS)
    plugins = config.pipeline.plugins.values()
    settings = kv_settings(plugins)
    if settings is None:
        raise click.ClickException(f"{shown_path(file)} has no precise-prefix-cache-producer, so no KV events are read")
    model = next((plugin.params.model_name for plugin in plugins if isinstance(plugin, Tokens)), "")
    return (
        settings.port,
        settings.replay_port,
        ExpectedEvents(topic=settings.topic, block_tokens=settings.block_tokens, model=model, events=events),
    )


def _parts(address: str, port: int) -> tuple[str, int]:
    """Splits HOST, HOST:PORT, [HOST]:PORT or tcp://HOST:PORT into host and port. `port`: the default."""
    text = address.removeprefix("tcp://")
    host, colon, number = text.rpartition(":")
    if not colon or text.endswith("]") or (text.count(":") > 1 and not text.startswith("[")):
        host, number = text, str(port)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not number.isascii() or not number.isdigit() or not 0 < int(number) <= 65535:
        raise click.UsageError(f"--kv-events is '{shown(address)}': write HOST or HOST:PORT, IPv6 in brackets")
    return host, int(number)


def _read(host: str, port: int, replay_port: int, wanted: ExpectedEvents, timeout_s: float) -> Heard:
    """Reads events until there are enough, or `timeout_s` seconds have passed. Raises Trouble without any event."""
    try:
        import zmq

        from workers.supervisor.kv_events.sockets import ReplayRequest, Subscription, tcp
    except ModuleNotFoundError as error:
        raise missing("doctor", error.name or "zmq", "kv-events") from error
    _reach(host, port, "the event port", "compare it with the port of the server's kv-events-config")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    heard = Heard(wanted)
    try:
        with closing(Subscription(context, tcp(host, port))) as subscription:
            _shake_hands(subscription, host, port)
            echo(f"connected to {subscription.address}")
            kept = 0
            if replay_port:
                _reach(host, replay_port, "the replay port", "compare replaySocketPort with the server's replay_endpoint")
                with closing(ReplayRequest(context, tcp(host, replay_port), 0)) as request:
                    kept = _replay(request, heard, f"{host}:{replay_port}")
            deadline = time.monotonic() + timeout_s
            while not heard.enough and (left := deadline - time.monotonic()) > 0:
                subscription.socket.poll(min(LOOK_MS, max(1, int(left * 1e3))))
                for topic, number, payload in subscription.messages():
                    _show(heard.take(topic, number, payload))
    finally:
        context.destroy(0)
    if not heard.messages:
        raise Trouble(_silent(timeout_s, asked=bool(replay_port), kept=kept))
    return heard


def _reach(host: str, port: int, what: str, fix: str) -> None:
    """Raises Trouble unless the port accepts connections. `what` and `fix`: used in the error text."""
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except ConnectionRefusedError:
        raise Trouble(f"refused: nothing listens on {what} {host}:{port}; {fix}") from None
    except TimeoutError:
        raise Trouble(f"no answer from {what} {host}:{port} in {CONNECT_S:.0f} s; a firewall may be in between") from None
    except UnicodeError:
        raise Trouble(f"{host} is no host name") from None
    except OSError as problem:
        raise Trouble(f"{what} {host}:{port} cannot be reached: {problem.strerror or problem}") from None


def _shake_hands(subscription: "Subscription", host: str, port: int) -> None:
    deadline = time.monotonic() + HANDSHAKE_S
    while not any(subscription.changes()):
        if time.monotonic() > deadline:
            raise Trouble(f"{host}:{port} accepts connections but does not speak ZeroMQ; it may be the port of another service")
        subscription.monitor.poll(LOOK_MS)


def _replay(request: "ReplayRequest", heard: Heard, where: str) -> int:
    """Reads the messages that the server has kept for replays. Returns their number. Raises Trouble if the server does not answer."""
    deadline = time.monotonic() + REPLAY_S
    first = last = -1
    kept = 0
    while True:
        request.socket.poll(LOOK_MS)
        for answer in request.answers():
            if answer is None:
                span = f", numbers {first} to {last}" if kept else ""
                echo(f"replay from {where}: {kept} messages{span}")
                return kept
            topic, number, payload = answer
            deadline = time.monotonic() + REPLAY_S
            first, last, kept = (number if first < 0 else first), number, kept + 1
            enough, lines = heard.enough, heard.take(topic, number, payload)
            if not enough:
                _show(lines)
        if time.monotonic() > deadline:
            raise Trouble(f"the replay port {where} does not answer; compare replaySocketPort with the server's replay_endpoint")


def _show(lines: Sequence[str]) -> None:
    for line in lines:
        echo(line)


def _silent(timeout_s: float, *, asked: bool, kept: int) -> str:
    replay = " and none to replay" if asked and not kept else ""
    return (
        f"no events in {timeout_s:g} s{replay}; send the server a new prompt meanwhile, and check that its kv-events-config has "
        "enable_kv_cache_events true and publisher zmq"
    )
