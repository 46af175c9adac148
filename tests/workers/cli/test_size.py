"""`epp size` on the command line."""

import json
import re

import pytest
from click.testing import CliRunner, Result

from workers.cli import main
from workers.cli.size import price, rounded
from workers.sizing import COSTS, MACHINE, Cost

LOAD = ("--rps", "300", "--prompt-kb", "220", "--pods", "100", "--chunk-rate", "5000")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["size", *arguments])


def test_a_load_becomes_cores_memory_and_flags_and_the_figures_say_where_they_are_from() -> None:
    result = run(*LOAD)
    assert result.exit_code == 0
    for text in (
        "cores",
        "memory",
        "shared memory",
        "epp serve --workers=",
        "resources: requests cpu",
        MACHINE,
        "make bench",
    ):
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
def test_what_is_recommended_is_what_manifests_accept(load: tuple[str, ...]) -> None:
    said = run(*load).stdout
    flags = re.search(r"epp serve (.*)", said)
    found = re.search(r"requests cpu (.*), memory (.*); limits cpu (.*), memory (.*); /dev/shm (.*);", said)
    assert flags and found
    cpu, memory, cpu_limit, memory_limit, shared = found.groups()
    settings = {"requests.cpu": cpu, "requests.memory": memory, "limits.cpu": cpu_limit, "limits.memory": memory_limit}
    arguments = ["manifests", "--selector=app=vllm"]
    arguments += [f"--set=router.epp.resources.{name}={value}" for name, value in settings.items()]
    result = CliRunner().invoke(main, [*arguments, "--", *flags[1].split()])
    assert result.exit_code == 0, result.stderr
    assert f"sizeLimit: {shared}" in result.stdout


def test_a_number_of_workers_that_is_too_small_is_shown_with_a_warning() -> None:
    result = run("--rps", "50000", "--workers", "1")
    assert result.exit_code == 0
    assert "100% of each" in result.stdout
    assert "warning: 1 worker cannot carry this load" in result.stdout


def test_a_load_without_requests_per_second_is_wrong_usage() -> None:
    result = run("--pods", "8")
    assert result.exit_code == 2
    assert "--rps" in result.stderr


def test_numbers_that_mean_nothing_are_refused() -> None:
    few = ("--rps", "1")
    for wrong in (("--rps", "-1"), ("--rps", "nan"), ("--rps", "inf"), (*few, "--pods", "0"), (*few, "--streams", "0")):
        assert run(*wrong).exit_code == 2, wrong
    assert run(*few, "--prompt-kb", "nan").exit_code == 2


def test_prices_have_their_unit_and_memory_is_rounded_up() -> None:
    assert price(Cost("x", "y", each=3)) == "3 µs"
    assert price(Cost("x", "y", each=3, most=0.01, half=100)) == "3 µs, +100 µs where few"
    assert price(Cost("x", "y", mib=2.5)) == "2.5 MiB"
    assert (rounded(0), rounded(15.9), rounded(16)) == (16, 16, 32)
