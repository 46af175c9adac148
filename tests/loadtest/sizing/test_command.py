"""`epp size` on the command line."""

import json
import re

import msgspec
import pytest
from click.testing import CliRunner, Result

from loadtest.sizing import model as sizing
from loadtest.sizing.command import price
from loadtest.sizing.model import COSTS, MACHINE, Cost, rounded
from workers.cli import main
from workers.cli.manifests.values import Values

LOAD = ("--rps", "300", "--prompt-kb", "220", "--pods", "100", "--chunk-rate", "5000")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["size", *arguments])


def test_a_load_becomes_cores_memory_and_flags_with_the_sources_of_the_figures() -> None:
    result = run(*LOAD)
    assert result.exit_code == 0
    for text in ("cores", "memory", "shared memory", "epp serve --workers=", "resources: requests cpu", MACHINE, "make bench"):
        assert text in result.stdout
    for cost in COSTS.values():
        assert cost.source in result.stdout


def test_json_has_the_load_the_needs_and_every_constant() -> None:
    found = json.loads(run(*LOAD, "--json").stdout)
    assert found["load"]["requests"] == 300
    assert found["needs"]["cores"] > 0
    assert found["recommended"]["flags"][0].startswith("--workers=")
    assert found["measured"]["costs"].keys() == COSTS.keys()


@pytest.mark.parametrize(
    "load",
    [
        LOAD,
        ("--rps", "1"),
        ("--rps", "3000", "--workers", "8"),
        ("--rps", "2000", "--pods", "2000", "--prompt-kb", "400", "--cache-tokens", "10000000"),
    ],
)
def test_manifests_accept_the_recommended_settings(load: tuple[str, ...]) -> None:
    output = run(*load).stdout
    flags = re.search(r"epp serve (.*)", output)
    resources = re.search(r"requests cpu (.*), memory (.*); limits cpu (.*), memory (.*); /dev/shm (.*);", output)
    assert flags and resources
    cpu, memory, cpu_limit, memory_limit, shared = resources.groups()
    settings = {"requests.cpu": cpu, "requests.memory": memory, "limits.cpu": cpu_limit, "limits.memory": memory_limit}
    arguments = ["manifests", "--selector=app=vllm"]
    arguments += [f"--set=router.epp.resources.{name}={value}" for name, value in settings.items()]
    result = CliRunner().invoke(main, [*arguments, "--", *flags[1].split()])
    assert result.exit_code == 0, result.stderr
    assert f"sizeLimit: {shared}" in result.stdout


def test_too_few_workers_get_a_warning() -> None:
    result = run("--rps", "50000", "--workers", "1")
    assert result.exit_code == 0
    assert "100% of each" in result.stdout
    assert "warning: 1 worker cannot carry this load" in result.stdout


def test_a_load_without_requests_per_second_is_a_usage_error() -> None:
    result = run("--pods", "8")
    assert result.exit_code == 2
    assert "--rps" in result.stderr


def test_numbers_without_meaning_are_refused() -> None:
    few = ("--rps", "1")
    for wrong in (("--rps", "-1"), ("--rps", "nan"), ("--rps", "inf"), (*few, "--pods", "0"), (*few, "--streams", "0")):
        assert run(*wrong).exit_code == 2, wrong
    assert run(*few, "--prompt-kb", "nan").exit_code == 2


def test_prices_have_units_and_memory_is_rounded_up() -> None:
    assert price(Cost("x", "y", each=3)) == "3 µs"
    assert price(Cost("x", "y", each=3, most=0.01, half=100)) == "3 µs, +100 µs at low rates"
    assert price(Cost("x", "y", mib=2.5)) == "2.5 MiB"
    assert (rounded(0), rounded(15.9), rounded(16)) == (16, 16, 32)


def test_the_memory_of_a_small_load_is_the_charts_default_and_no_advice_is_below_it() -> None:
    resources = msgspec.to_builtins(Values()).get("router")["epp"]["resources"]
    small = sizing.size(sizing.Load(requests=1))
    assert resources["requests"]["memory"] == f"{sizing.memory_request_mib(small) >> 10}Gi"
    assert resources["limits"]["memory"] == f"{sizing.memory_limit_mib(small) >> 10}Gi"
    large = sizing.size(sizing.Load(requests=5_000, prompt_kb=200, endpoints=1_000, chunks=50_000))
    assert sizing.memory_request_mib(large) >= large.memory_mib
    assert sizing.memory_limit_mib(large) >= 2 * large.memory_mib
