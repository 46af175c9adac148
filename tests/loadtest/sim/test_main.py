"""The command line of the simulated servers."""

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml

from loadtest.sim import main as sim

ROOT = Path(__file__).parents[3]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "loadtest.sim.main", *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_prints_a_ready_line_and_exits_with_0_at_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    file = tmp_path / "endpoints.yaml"
    flags = ("--labels", "role=decode", "--role", "prefill,decode,both")
    with start("--servers", "3", "--port", "0", "--endpoints-file", str(file), *flags) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith("ready servers=3 first=127.0.0.1:")
            endpoints = yaml.safe_load(file.read_text())["endpoints"]
            assert [endpoint["name"] for endpoint in endpoints] == ["sim-0", "sim-1", "sim-2"]
            assert endpoints[0]["labels"] == {"role": "decode", "llm-d.ai/role": "prefill"}
            assert [endpoint["labels"]["llm-d.ai/role"] for endpoint in endpoints] == ["prefill", "decode", "both"]
            for endpoint in endpoints:
                url = f"http://{endpoint['address']}:{endpoint['port']}/sim/stats"
                with urllib.request.urlopen(url, timeout=10) as answer:
                    assert json.load(answer)["server"] == endpoint["name"]
            assert isinstance(endpoints[0]["port"], str)
            assert [path.name for path in tmp_path.iterdir()] == ["endpoints.yaml"]
            process.send_signal(number)
            output, errors = process.communicate(timeout=10)
            assert (process.returncode, output, errors) == (0, "", "")
        finally:
            process.kill()


def test_a_port_in_use_is_named_and_the_exit_code_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert sim.main(["--port", str(port)]) == 1
    assert str(port) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--servers", "0"], "whole number from 1"),
        (["--servers", "10", "--port", "65530"], "exceed port 65535"),
        (["--addresses", "nowhere"], "not HOST:PORT"),
        (["--addresses", ","], "give 1 to 2000"),
        (["--addresses", "h:99999"], "not HOST:PORT"),
        (["--decode-ms", "-1"], "not a number from 0"),
        (["--time-scale", "x"], "not a number from 0.001"),
        (["--labels", "x"], "not KEY=VALUE"),
        (["--model", ""], "name at least one model"),
        (["--role", "cook"], "--role contains 'cook'; valid roles: prefill, decode"),
        (["--servers", "3", "--role", "prefill,decode"], "--role has 2 roles for 3 servers"),
    ],
)
def test_a_wrong_command_line_is_refused_with_its_reason(arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        sim.main(arguments)
    assert end.value.code == 2
    assert word in capsys.readouterr().err


def test_addresses_are_used_unchanged() -> None:
    options = sim.parser().parse_args(["--addresses", "127.0.1.1:8000, 127.0.1.2:8001"])
    assert sim.addresses(options) == [("127.0.1.1", 8000), ("127.0.1.2", 8001)]


def test_servers_get_consecutive_ports_or_free_ones() -> None:
    options = sim.parser().parse_args(["--servers", "3", "--port", "9000"])
    assert [port for _, port in sim.addresses(options)] == [9000, 9001, 9002]
    options = sim.parser().parse_args(["--servers", "2", "--port", "0"])
    assert [port for _, port in sim.addresses(options)] == [0, 0]


def test_options_become_engine_seconds_and_slots() -> None:
    options = sim.parser().parse_args(["--decode-ms", "10", "--prefill-us-per-token", "25", "--loras", "a,b", "--max-loras", "1"])
    settings = sim.settings(options)
    assert settings.engine.decode_s == 0.01
    assert settings.engine.prefill_s_per_token == 25e-6
    assert (settings.loras, settings.engine.max_loras) == (("a", "b"), 1)
    assert sim.settings(sim.parser().parse_args([])).engine.max_loras == 0
    slots = sim.settings(sim.parser().parse_args(["--slots", "4", "--overhead-ms", "5"]))
    assert (slots.slots, slots.engine.max_running, slots.engine.overhead_s) == (True, 4, 0.005)
