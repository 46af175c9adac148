import msgspec
import pytest

from epp.plugins.extractors.metrics_source import MetricsDataSource, parse_interval


def source(**params: object) -> MetricsDataSource:
    return MetricsDataSource("s", msgspec.convert(params, MetricsDataSource.Params))


def test_by_default_it_scrapes_plain_http_at_metrics_with_the_period_of_the_flag() -> None:
    ours = source()
    assert (ours.scheme, ours.path, ours.port, ours.interval_s) == ("http", "/metrics", None, None)
    assert ours.insecure_skip_verify


@pytest.mark.parametrize(
    ("text", "seconds"), [("50ms", 0.05), ("1s", 1.0), ("1m30s", 90.0), (".1h", 360.0), ("250us", 0.00025), ("+1s", 1.0)]
)
def test_intervals_are_durations(text: str, seconds: float) -> None:
    assert source(interval=text).interval_s == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "-1s", "1 s", "s", "1d"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="interval: "):
        parse_interval(text)


def test_an_interval_of_zero_means_the_period_of_the_flag() -> None:
    assert source(interval="0").interval_s is None
    assert source(interval="0s").interval_s is None


def test_an_interval_so_long_that_all_values_become_stale_is_refused() -> None:
    with pytest.raises(ValueError, match="interval: 2h is above the maximum, 600s"):
        source(interval="2h")


def test_a_path_gets_a_leading_slash_and_cannot_inject_a_header() -> None:
    assert source(path="stats").path == "/stats"
    with pytest.raises(ValueError, match="path: "):
        source(path="/a HTTP/1.1\r\nX: y")


def test_a_client_certificate_needs_its_key() -> None:
    with pytest.raises(ValueError, match="clientCertPath and clientKeyPath go together"):
        source(clientCertPath="c.pem")
    assert source(clientCertPath="c.pem", clientKeyPath="k.pem").client_key_path == "k.pem"


@pytest.mark.parametrize("params", [{"scheme": "ftp"}, {"port": 0}, {"port": 65536}, {"x": 1}])
def test_schemes_ports_and_unknown_parameters_are_checked(params: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        source(**params)
