"""Tests of the latency model on the metrics page."""

from epp.learning.model import FirstToken, LatencyModel
from tests.fakes import endpoints
from workers.supervisor.pages.sections import latency_figures

NOW = 100.0


def rows(model: LatencyModel) -> dict[str, dict[tuple[str, ...], object]]:
    found = latency_figures(model, "pool", endpoints(3), NOW, alone=True)
    return {metric.name: dict(values) for metric, _, values in found}


def test_nothing_is_shown_before_the_first_answer() -> None:
    model = LatencyModel()
    model.scraped(0, 0, 3.0, 1.0)
    assert rows(model) == {}


def test_errors_and_coefficients_are_shown_per_endpoint() -> None:
    model = LatencyModel()
    for predicted in (0.1, 0.13, 0.5):
        model.learn_first(FirstToken(NOW, 1, 0, 100.0, 0.0, 0.0, 1.0, predicted, 0.1))
    found = rows(model)
    counts, total = found["learned_latency_error_ratio"][("pool", "pod-1")]
    assert counts == [1, 1, 1, 1, 2, 2, 2, 3]
    assert abs(total - (0.0 + 0.3 + 4.0)) < 1e-9
    seconds = found["learned_latency_seconds"]
    assert {labels[1] for labels in seconds} == {"pod-1"}
    assert seconds[("pool", "pod-1", "per_uncached_token")] == model.speed(1, NOW) * model.first.theta[1] / 1000.0
    assert found["learned_latency_model_used"] == {(): float(model.trusted)}
    assert set(found["learned_latency_recent_error_ratio"]) == {("model",), ("mean",)}
