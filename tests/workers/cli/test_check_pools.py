"""`epp config check` of a pools file: the file and the configuration of each pool, with file and line; and its JSON Schema."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from epp.config.load import load
from epp.config.pools_file import pools_schema
from workers.cli import main
from workers.host.exit_codes import ExitCode

SHIPPED = Path(__file__).parents[3] / "deploy" / "pools.yaml"
TEXT = """\
pools:
- {name: a, port: 9102, endpoints: ["10.0.0.1:8000"], configFile: own.yaml}
- {name: b, models: [m], endpoints: ["10.0.0.2:8000"], configFile: own.yaml}
- name: c
  models: ["x-*"]
  endpoints: ["10.0.0.3:8000"]
  config: |
    plugins: [{type: kv-cache-utilization-scorer}]
"""
OWN = "plugins: [{type: queue-scorer}]\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "own.yaml").write_text(OWN)
    (tmp_path / "pools.yaml").write_text(TEXT)
    return tmp_path / "pools.yaml"


def check(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["check", *args], input=stdin)


def test_the_effective_configuration_of_each_pool_is_printed_equal_ones_once(file: Path) -> None:
    result = check(str(file))
    assert result.exit_code == ExitCode.OK, result.stderr
    first, second = result.stdout.split("---\n")
    assert first.startswith(f"# a, b: {file.parent}/own.yaml\n") and second.startswith(f"# c: {file}\n")
    assert load(first, "again").as_yaml() == first.partition("\n")[2]
    document = json.loads(check("--json", str(file)).stdout)["effective"]
    assert document["a"] == document["b"] != document["c"]


SPECULATIVE = "precise-prefix-cache-producer, parameters: {speculativeIndexing: true}"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"pools.yaml": TEXT.replace("name: b", "name: a")}, r"pools.yaml:3:10: error\[duplicate-name\]"),
        ({"pools.yaml": TEXT.replace("9102", "9002")}, r"pools.yaml:2:19: error\[two-pools\]: pool 'a': port 9002 is that of --grpc-port"),
        ({"pools.yaml": TEXT.replace("own.yaml", "none.yaml", 1)}, r"pools.yaml:2:67: error\[unreadable\]: pool 'a': the file .*none.yaml"),
        ({"own.yaml": "plugins:\n- type: queue-scrorer\n"}, r"own.yaml:2:9: error\[unknown-type\]: plugin type 'queue-scrorer'"),
        ({"pools.yaml": TEXT.replace("kv-cache-", "kv-cash-")}, r"pools.yaml:8:18: error\[unknown-type\]"),
        ({"pools.yaml": TEXT.replace('  endpoints: ["10.0.0.3:8000"]\n', "")}, r"pools.yaml:4:9: error\[no-discovery\]: pool 'c'"),
        (
            {
                "own.yaml": "plugins: [{type: precise-prefix-cache-producer}]",
                "pools.yaml": TEXT.replace("kv-cache-utilization-scorer", SPECULATIVE),
            },
            r"pools.yaml:4:9: error\[one-pool\]: pool 'c': .* speculativeTTL differs from that of pool 'a'",
        ),
    ],
)
def test_each_mistake_has_its_file_and_its_line(file: Path, changed: dict[str, str], why: str) -> None:
    for name, text in changed.items():
        (file.parent / name).write_text(text)
    result = check(str(file))
    assert (result.exit_code, result.stdout) == (ExitCode.CONFIG, "")
    assert re.search(why, result.stderr), result.stderr
    found = json.loads(check("--json", str(file)).stdout)
    assert found["effective"] is None and {each["severity"] for each in found["findings"]} >= {"error"}


def test_a_mistake_in_a_shared_configuration_is_told_once(file: Path) -> None:
    (file.parent / "own.yaml").write_text("plugins: [{type: queue-scrorer}]")
    assert check(str(file)).stderr.count("unknown-type") == 1


def test_a_warning_fails_only_if_it_is_asked_for(file: Path) -> None:
    (file.parent / "own.yaml").write_text("plugins: [{type: queue-scorer, parameters: {a: 1}}]")
    assert "own.yaml:1:" in check(str(file)).stderr
    assert [check(*flags, str(file)).exit_code for flags in ([], ["--strict"])] == [ExitCode.OK, ExitCode.CONFIG]
    assert check("--quiet", str(file)).output == ""


def test_a_pools_file_can_come_from_standard_input_and_has_no_older_form(file: Path) -> None:
    assert check("-", stdin=SHIPPED.read_text()).exit_code == ExitCode.OK
    refused = check("--migrate", str(file))
    assert refused.exit_code == ExitCode.CONFIG and "a pools file has only one form" in refused.stderr


def test_the_schema_has_the_fields_that_the_shipped_file_shows() -> None:
    printed = CliRunner().invoke(main, ["schema", "--pools"])
    assert json.loads(printed.stdout) == pools_schema()
    parts = pools_schema()["$defs"]
    shipped: Any = yaml.safe_load(SHIPPED.read_text())
    assert set(shipped) <= set(parts["PoolsForm"]["properties"])
    assert {field for pool in shipped["pools"] for field in pool} <= set(parts["PoolForm"]["properties"])
    assert all("description" in field for field in parts["PoolForm"]["properties"].values())
