"""The output of the scaling benchmark on a machine with too few cores, and the check of `epp size`."""

import io
from typing import Any

import pytest
from rich.console import Console

from tests.bench import scaling
from tests.bench.scaling import FACTOR, configured, fits, parser, scaled, scaling_table


def row(workers: int) -> dict[str, Any]:
    return {
        "run": {"workers": workers},
        "requests_per_s": 2_000.0,
        "cpu_us_per_request": 130.0,
        "cores_by_process": {scaling.WORKER: 0.2, scaling.SUPERVISOR: 0.05},
        "pick_ms": {"p50": 1.5},
        "memory_mib": 70.0,
        "endings": {"ok": 10},
    }


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Records the requested runs instead of starting pickers, on a machine with 2 cores."""
    requested: list[tuple[int, int]] = []

    def measure(run: Any, options: Any) -> dict[str, Any]:
        requested.append((run.workers, options.endpoints))
        return row(run.workers)

    monkeypatch.setattr(scaling, "measure", measure)
    monkeypatch.setattr(scaling, "cores", lambda: 2)
    return requested


def test_runs_vary_the_workers_first_and_then_the_endpoints_of_one_worker(runs: list[tuple[int, int]]) -> None:
    scaled(parser().parse_args([]))
    assert runs == [(1, 8), (2, 8), (4, 8), (8, 8), (1, 100), (1, 1_000)]


def test_requests_per_second_are_shown_only_if_each_worker_has_a_core(runs: list[tuple[int, int]]) -> None:
    rows = scaled(parser().parse_args(["--workers", "2,4", "--endpoints", "8"]))
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(scaling_table(rows))
    two, four = (line for line in console.export_text().splitlines() if "130 µs" in line)
    assert "2,000" in two
    assert "2,000" not in four and "fewer cores" in four
    assert "100 µs" in two  # the part of the workers: 0.2 cores for 2,000 requests/s


@pytest.mark.parametrize(("endpoints", "interval"), [(8, "50ms"), (100, "50ms"), (1_000, "500ms")])
def test_many_endpoints_are_scraped_less_often(endpoints: int, interval: str) -> None:
    assert configured(parser().parse_args([]), endpoints).flag == [f"--refresh-metrics-interval={interval}"]


@pytest.mark.parametrize(("ratio", "fit"), [(1.0, True), (FACTOR, True), (FACTOR + 0.1, False), (0.4, False), (0.0, False)])
def test_a_prediction_fits_within_its_factor_in_both_directions(ratio: float, fit: bool) -> None:
    assert fits({"figures": {"good": {"ratio": 1.0}, "other": {"ratio": ratio}}}) is fit


def test_a_wrong_prediction_of_epp_size_is_reported_and_is_not_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = row(1) | {"cores_by_process": {scaling.WORKER: 2.0, scaling.SUPERVISOR: 0.9}}
    monkeypatch.setattr(scaling, "measure", lambda run, options: slow)
    monkeypatch.setattr("sys.argv", ["scaling", "--smoke"])
    assert scaling.main() == 0
    assert "off by more than a factor of 2" in capsys.readouterr().err


def test_a_run_with_failed_requests_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "measure", lambda run, options: row(run.workers) | {"endings": {"ok": 9, "lost": 1}})
    monkeypatch.setattr("sys.argv", ["scaling", "--smoke"])
    assert scaling.main() == 1


def test_epp_size_is_compared_with_the_measured_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "measure", lambda run, options: row(run.workers))
    result = scaling.check(parser().parse_args([]), scaling.CHECKED[0])
    assert [figure["measured"] for figure in result["figures"].values()] == [0.2, 0.05, 70.0]
    assert scaling.check_table(result).row_count == 3
