"""`epp demo --precise` compares precise with approximate matches."""

import json

from click.testing import CliRunner

from loadtest.demo.children import python
from tests.e2e.cluster import run
from workers.cli import main


def test_both_runs_are_printed_side_by_side() -> None:
    done = run(python("workers", "demo", "--precise", "--servers=2", "--seconds=12", "--concurrency=6", "--json"), 120.0)
    assert done.returncode == 0, done.stderr
    columns = json.loads(done.stdout)
    assert columns.pop("verdict")
    assert set(columns) == {"precise", "approximate"}
    assert [each["errors"] for each in columns.values()] == [0, 0]
    assert all(each["requests"] > 5 for each in columns.values())
    assert all(each["cached_share"] > 0 for each in columns.values())


def test_it_cannot_be_combined_with_a_command() -> None:
    refused = CliRunner().invoke(main, ["demo", "--precise", "--run", "true"])
    assert refused.exit_code == 2
    assert "--precise and --run exclude each other" in refused.stderr
