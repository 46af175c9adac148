"""Settings of traces: the variables, their defaults and precedence, and what is refused at the start."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from tests.cases import cases
from tests.workers.worker.telemetry.traces import python
from workers.cli.serve_options import serve_options
from workers.host.exit_codes import ExitCode
from workers.host.options import Options, TracingOptions
from workers.worker.telemetry.tracing_settings import settings


def read_settings(installed: Callable[[str], Any] = lambda _: True, **environ: str) -> tuple[TracingOptions | None, list[str]]:
    return settings({f"OTEL_{name}": value for name, value in environ.items()}, installed)


@pytest.mark.parametrize(
    "environ",
    [{}, {"TRACES_EXPORTER": ""}, {"TRACES_EXPORTER": "none", "TRACES_SAMPLER": "x"}, {"TRACES_EXPORTER": "otlp", "SDK_DISABLED": "true"},
     {"EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}],
)  # fmt: skip
def test_there_are_no_traces_unless_an_exporter_is_named(environ: dict[str, str]) -> None:
    assert read_settings(lambda module: pytest.fail(f"looked for {module}"), **environ) == (None, [])


def test_the_defaults_are_a_tenth_of_the_requests_in_plain_grpc() -> None:
    assert read_settings(TRACES_EXPORTER="otlp") == (TracingOptions(exporter="otlp", ratio=0.1, timeout_s=10.0, compression="none"), [])
    assert read_settings(TRACES_EXPORTER="console") == (TracingOptions(exporter="console"), [])


def test_variables_for_traces_take_precedence_over_those_for_all_signals(tmp_path: Path) -> None:
    pem = tmp_path / "ca.pem"
    pem.touch()
    found, wrong = read_settings(
        TRACES_EXPORTER="OTLP", TRACES_SAMPLER="parentbased_traceidratio", TRACES_SAMPLER_ARG="1",
        EXPORTER_OTLP_TIMEOUT="1", EXPORTER_OTLP_TRACES_TIMEOUT="2500", EXPORTER_OTLP_COMPRESSION="gzip",
        EXPORTER_OTLP_PROTOCOL="grpc", EXPORTER_OTLP_ENDPOINT="https://collector", EXPORTER_OTLP_CERTIFICATE=str(pem),
    )  # fmt: skip
    assert (found, wrong) == (TracingOptions(exporter="otlp", ratio=1.0, timeout_s=2.5, compression="gzip"), [])


@pytest.mark.parametrize(
    ("sampler", "ratio", "parent_based"),
    [
        ("always_on", 1.0, False), ("always_off", 0.0, False), ("traceidratio", 0.3, False), ("parentbased_always_on", 1.0, True),
        ("PARENTBASED_ALWAYS_OFF", 0.0, True), ("parentbased_traceidratio", 0.3, True), ("", 0.3, True),
    ],
)  # fmt: skip
def test_the_standard_samplers_are_known(sampler: str, ratio: float, parent_based: bool) -> None:
    found, wrong = read_settings(TRACES_EXPORTER="otlp", TRACES_SAMPLER=sampler, TRACES_SAMPLER_ARG="0.3")
    assert (found, wrong) == (TracingOptions(exporter="otlp", ratio=ratio, parent_based=parent_based), [])


@cases(
    ("environ", "text"),
    [
        ({"TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER 'zipkin' is not supported; use console, otlp or none"),
        ({"TRACES_SAMPLER": "xray"}, "OTEL_TRACES_SAMPLER 'xray' is not known; use one of always_on, always_off, traceidratio"),
        ({"TRACES_SAMPLER_ARG": "2"}, "OTEL_TRACES_SAMPLER_ARG '2' is not a number from 0 to 1"),
        ({"TRACES_SAMPLER_ARG": "nan"}, "OTEL_TRACES_SAMPLER_ARG 'nan' is not a number from 0 to 1"),
        ({"TRACES_SAMPLER_ARG": "x"}, "OTEL_TRACES_SAMPLER_ARG 'x' is not a number from 0 to 1"),
        ({"EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL 'http/json' is not supported; use grpc"),
        ({"EXPORTER_OTLP_COMPRESSION": "zstd"}, "OTEL_EXPORTER_OTLP_COMPRESSION 'zstd' is not supported; use none or gzip"),
        ({"EXPORTER_OTLP_TIMEOUT": "10s"}, "OTEL_EXPORTER_OTLP_TIMEOUT '10s' is not a number of milliseconds above 0"),
        ({"EXPORTER_OTLP_TIMEOUT": "0"}, "OTEL_EXPORTER_OTLP_TIMEOUT '0' is not a number of milliseconds above 0"),
        ({"EXPORTER_OTLP_ENDPOINT": "ftp://x"}, "OTEL_EXPORTER_OTLP_ENDPOINT 'ftp://x' is not an http:// or https:// URL"),
        ({"EXPORTER_OTLP_ENDPOINT": "http://x:y"}, "OTEL_EXPORTER_OTLP_ENDPOINT 'http://x:y' is not an http:// or https:// URL"),
        ({"EXPORTER_OTLP_CERTIFICATE": "nowhere.pem"}, "OTEL_EXPORTER_OTLP_CERTIFICATE 'nowhere.pem' cannot be read"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_with_the_name_of_the_variable(environ: dict[str, str], text: str) -> None:
    found, (line,) = read_settings(**({"TRACES_EXPORTER": "otlp"} | environ))
    assert found is None
    assert text in line


@pytest.mark.parametrize("exporter", ["otlp", "console"])
def test_without_the_extra_the_error_says_how_to_install_it(exporter: str) -> None:
    def missing(module: str) -> None:
        raise ModuleNotFoundError(module)

    for installed in (missing, lambda _: None):
        _, (line,) = read_settings(installed, TRACES_EXPORTER=exporter)
        assert f"OTEL_TRACES_EXPORTER={exporter} needs OpenTelemetry, which is not installed" in line
        assert "pip install 'endpoint-picker[otel]'" in line


def served(*args: str, **environ: str) -> tuple[Result, Options | None]:
    """`epp serve` as far as its options."""
    seen: list[Options] = []

    @click.command()
    @serve_options
    def command(options: Options) -> None:
        seen.append(options)

    clean = dict.fromkeys(name for name in os.environ if name.startswith("OTEL_"))
    result = CliRunner().invoke(command, list(args), env=clean | environ)
    return result, seen[0] if seen else None


def test_the_flag_switches_off_traces_that_the_environment_enables() -> None:
    environ = {"OTEL_TRACES_EXPORTER": "console", "OTEL_TRACES_SAMPLER_ARG": "0.5"}
    wanted = TracingOptions(exporter="console", ratio=0.5)
    for flags, expected in ((), wanted), (("--tracing",), wanted), (("--tracing=false",), None):
        result, options = served(*flags, **environ)
        assert (result.stderr, options is not None and options.tracing) == ("", expected)


def test_wrong_variables_stop_the_start_unless_tracing_is_off() -> None:
    environ = {"OTEL_TRACES_EXPORTER": "console", "OTEL_TRACES_SAMPLER": "sometimes"}
    result, options = served(**environ)
    assert (result.exit_code, options) == (ExitCode.CONFIG, None)
    assert result.stderr.startswith("error: OTEL_TRACES_SAMPLER 'sometimes' is not known")
    _, options = served("--tracing=false", **environ)
    assert options is not None
    assert options.tracing is None


def test_the_flag_alone_has_no_effect_and_says_so() -> None:
    result, options = served("--tracing")
    assert result.stderr.startswith("warning: --tracing has no effect: OTEL_TRACES_EXPORTER is not set")
    assert options is not None
    assert options.tracing is None


LOADED = "print(sorted(m for m in sys.modules if m.partition('.')[0] in ('grpc', 'opentelemetry') and sys.modules[m].__spec__.origin))"


def test_modules_that_are_imported_before_the_fork_do_not_import_opentelemetry() -> None:
    script = "import os, sys, workers.worker.main, workers.worker.telemetry.tracing_settings as t; found, wrong = t.settings(os.environ); "
    script += "assert not wrong; print(found and found.exporter, len(os.listdir('/proc/self/task'))); " + LOADED
    assert python(script, OPENBLAS_NUM_THREADS="1") == "None 1\n[]"
    assert python(script, OPENBLAS_NUM_THREADS="1", OTEL_TRACES_EXPORTER="otlp") == "otlp 1\n[]"
