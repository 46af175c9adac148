from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from shm.prefix_index import IndexSchema
from workers.cli.flags import Once
from workers.cli.options import INDEX_ENTRIES_MIN, REPLACED, UNSUPPORTED, Options, serve_options
from workers.cpus import available
from workers.exit_codes import ExitCode

Env = dict[str, str | None]


def run(*args: str, env: Env | None = None) -> tuple[Result, Options | None]:
    seen: list[Options] = []

    @click.command()
    @serve_options
    @click.option("--own", default="x")
    def command(options: Options, own: str) -> None:
        assert own == "x"
        seen.append(options)

    clean: Env = dict.fromkeys(("NAMESPACE", "POD_NAME"))
    result = CliRunner().invoke(command, list(args), env=clean | (env or {}))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result, seen[0] if seen else None


def ok(*args: str, env: Env | None = None) -> Options:
    result, options = run(*args, env=env)
    assert result.exit_code == 0, result.stderr
    assert options is not None
    assert result.stderr == ""
    return options


def warned(*args: str) -> list[str]:
    result, options = run(*args)
    assert options is not None, result.stderr
    return result.stderr.splitlines()


def refused(*args: str, env: Env | None = None) -> list[str]:
    result, _ = run(*args, env=env)
    assert result.exit_code == ExitCode.CONFIG, result.stderr
    return result.stderr.splitlines()


def test_the_defaults_are_those_of_the_struct_but_for_the_number_of_workers() -> None:
    assert ok() == Options(workers=available())


@pytest.mark.parametrize(
    ("args", "field", "value"),
    [
        (["--secure-serving"], "secure_serving", True),
        (["--secure-serving=false"], "secure_serving", False),
        (["--secure-serving=F"], "secure_serving", False),
        (["--secure-serving", "--grpc-port=1"], "secure_serving", True),
        (["--grpc-port=1234"], "grpc_port", 1234),
        (["--grpc-port", "1234"], "instance", "epp-1234"),
        (["--instance", "mine"], "instance", "mine"),
        (["--drain-timeout=1m30s"], "drain_timeout_s", 90.0),
        (["--body-limit=1MiB"], "body_bytes_max", 1 << 20),
        (["--body-limit=1MiB"], "message_bytes_max", 2 << 20),
        (["--grpc-max-recv-msg-size=10MiB"], "message_bytes_max", 10 << 20),
        (["--grpc-max-recv-msg-size="], "message_bytes_max", 33 << 20),
        (["--grpc-max-send-msg-size=25MB"], "body_bytes_max", 32 << 20),
        (["-w", "3"], "workers", 3),
        (["--state-dir=/var/lib/epp"], "state_dir", "/var/lib/epp"),
        (["--workers=2"], "workers", 2),
        (["--workers=2"], "workers_max", 0),
        (["--workers=2", "--workers-max=2"], "workers_max", 2),
        (["--worker-memory-limit=1GiB"], "worker_memory_limit", 1 << 30),
        (["--worker-memory-limit=0"], "worker_memory_limit", 0),
        (["--workers=2"], "worker_memory_limit", None),
        (["-c", "f.yaml"], "config_file", "f.yaml"),
        (["--config-text=a"], "config_text", "a"),
        (["--refresh-metrics-interval=1s"], "scrape_interval_s", 1.0),
        (["--tls-cipher-suites=A, B"], "tls_cipher_suites", ("A", "B")),
        (["--tls-min-version=VersionTLS13"], "tls_min_version", "VersionTLS13"),
        (["--pool-name=p"], "pool_name", "p"),
        (["-v=4"], "log_level", "debug"),
        (["-v", "3"], "log_level", "info"),
        (["--v=5"], "log_level", "debug"),
        (["-v=-7"], "log_level", "info"),
        (["-v=5", "--zap-log-level=error"], "log_level", "error"),
        (["--zap-log-level=3"], "log_level", "debug"),
        (["--zap-log-level=panic"], "log_level", "error"),
        (["--zap-log-level=WARN"], "log_level", "warning"),
        (["--log-level=warning", "--zap-log-level=debug"], "log_level", "warning"),
        (["--zap-encoder=json"], "log_format", "json"),
        (["--zap-encoder=JSON"], "log_format", "json"),
        (["--zap-encoder=json", "--log-format=console"], "log_format", "console"),
        (["--endpoints=a:1,b:2"], "endpoints", "a:1,b:2"),
        (["--disable-endpoint-subset-filter"], "disable_endpoint_subset_filter", True),
        ([], "trust_client_headers", ("fairness", "objective", "ttl", "slo", "model")),
        (["--trust-client-headers=all"], "trust_client_headers", ("fairness", "objective", "ttl", "slo", "model")),
        (["--trust-client-headers=none"], "trust_client_headers", ()),
        (["--trust-client-headers=slo,fairness"], "trust_client_headers", ("fairness", "slo")),
        (["--enable-grpc-stream-metrics"], "enable_grpc_stream_metrics", True),
        (["--metrics-legacy-names=false"], "metrics_legacy_names", False),
        (["--enable-cert-reload", "--cert-path=certs"], "enable_cert_reload", True),
        (["--client-ca-file=ca.pem"], "client_ca_file", "ca.pem"),
        (["--metrics-cert-dir=certs", "--metrics-client-ca-file=ca.pem"], "metrics_cert_dir", "certs"),
        (["--health-checking"], "health_checking", True),
    ],
)  # fmt: skip
def test_a_flag_is_written_as_in_the_field(args: list[str], field: str, value: Any) -> None:
    assert getattr(ok(*args), field) == value


def test_the_smallest_index_that_is_taken_can_be_made_and_a_smaller_one_is_wrong_usage() -> None:
    assert IndexSchema(ok(f"--index-entries={INDEX_ENTRIES_MIN}").index_entries).entries == INDEX_ENTRIES_MIN
    result, _ = run(f"--index-entries={INDEX_ENTRIES_MIN - 1}")
    assert result.exit_code == ExitCode.USAGE
    assert f"x>={INDEX_ENTRIES_MIN}" in result.stderr


def test_port_0_is_for_any_free_port_and_the_instance_is_named_by_the_process() -> None:
    assert ok("--grpc-port=0").instance.startswith("epp-pid")


def test_every_flag_has_an_environment_variable_and_the_command_line_wins() -> None:
    env: Env = {
        "EPP_GRPC_PORT": "1",
        "EPP_SECURE_SERVING": "false",
        "EPP_MAX_ENDPOINTS": "7",
        "EPP_POOL_NAMESPACE": "a",
        "NAMESPACE": "b",
    }
    options = ok("--grpc-port=2", env=env)
    assert (options.grpc_port, options.secure_serving, options.max_endpoints, options.pool_namespace) == (
        2,
        False,
        7,
        "a",
    )


def test_what_kubernetes_puts_into_the_environment_is_honoured_or_ignored() -> None:
    env: Env = {
        "NAMESPACE": "inference",
        "POD_NAME": "my-epp-5d8f9c-x2x4z",
        "EPP_METRICS_PORT": "tcp://10.0.0.1:9090",
        "EPP_GRPC_PORT": "",
    }
    options = ok(env=env)
    assert (options.pool_namespace, options.pool_name, options.metrics_port, options.grpc_port) == (
        "inference",
        "my-epp",
        9090,
        9002,
    )
    assert ok(env={"POD_NAME": "short"}).pool_name == "epp"


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--endpoint-target-ports=8000,8001", "has no effect without --endpoint-selector"),
        ("--metrics-client-ca-file=ca.pem", "give --metrics-cert-dir too"),
        ("--tls-min-version=TLS9", "use VersionTLS12 or VersionTLS13"),
        ("--grpc-max-send-msg-size=1Ki", "is too small"),
        ("--grpc-max-recv-msg-size=10m", "is too small"),
        ("--zap-log-level=loud", "is none of"),
        ("--instance=a/b", "has a slash"),
        *((f"--{name}=x", "deprecated and cannot be used; use engineConfigs") for name in REPLACED),
    ],
)  # fmt: skip
def test_what_would_be_ignored_is_refused(flag: str, text: str) -> None:
    (line,) = refused(flag)
    assert line.startswith("error: --")
    assert text in line


POD: Env = {"POD_NAME": "my-epp-5d8f9c-x2x4z"}
SELECTED = ("--endpoint-selector=app=vllm,tier in (a, b),!canary", "--endpoint-target-ports=8000,8001,8000")


def test_pods_are_selected_by_labels_and_the_deployment_names_the_pool() -> None:
    options = ok(*SELECTED, env=POD)
    assert options.endpoint_selector == "app=vllm,tier in (a, b),!canary"
    assert (options.endpoint_target_ports, options.pool_name, options.pool_given) == ((8000, 8001), "my-epp", False)


def test_a_pool_that_was_named_differs_from_a_name_that_was_found() -> None:
    assert ok("--pool-name=my-epp").pool_given
    assert not ok(env=POD).pool_given
    assert ok("--pool-name=p", "--pool-group=example.com").pool_group == "example.com"


@pytest.mark.parametrize(
    ("args", "env", "text"),
    [
        ((*SELECTED, "--pool-name=p"), POD, "--pool-name and --endpoint-selector cannot be set at the same time"),
        (SELECTED, {}, "needs the environment variable POD_NAME in the form <deployment>-<replica set>-<id>"),
        (SELECTED, {"POD_NAME": "alone"}, "it is 'alone'"),
        (SELECTED[:1], POD, "needs --endpoint-target-ports with 1 to 8 ports, not 0"),
        ((SELECTED[0], "--endpoint-target-ports=1,2,3,4,5,6,7,8,9"), POD, "with 1 to 8 ports, not 9"),
        ((SELECTED[0], "--endpoint-target-ports=0"), POD, "0 is not from 1 to 65535"),
        (("--endpoint-selector=a in b", SELECTED[1]), POD, "--endpoint-selector: 'a in b': '(' is expected, not 'b'"),
    ],
)
def test_a_selector_that_cannot_work_is_refused(args: tuple[str, ...], env: Env, text: str) -> None:
    (line,) = refused(*args, env=env)
    assert text in line


def test_leader_election_is_off_and_tokens_are_asked_for_in_kubernetes_unless_said_otherwise() -> None:
    options = ok("--pool-name=p")
    assert (options.ha_enable_leader_election, options.metrics_endpoint_auth) == (False, None)
    options = ok("--pool-name=p", "--ha-enable-leader-election", "--metrics-endpoint-auth=false")
    assert (options.ha_enable_leader_election, options.metrics_endpoint_auth) == (True, False)


def test_tls_on_the_metrics_port_is_enough_where_tokens_are_asked_for() -> None:
    assert warned("--metrics-cert-dir=c", "--pool-name=p") == []
    (line,) = warned("--metrics-cert-dir=c", "--pool-name=p", "--metrics-endpoint-auth=false")
    assert "anyone can read the port's pages" in line


def test_client_certificates_without_tls_are_refused() -> None:
    (line,) = refused("--client-ca-file=ca.pem", "--secure-serving=false")
    assert line.startswith("error: --client-ca-file needs TLS")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--enable-cert-reload"], "--enable-cert-reload has no effect"),
        (["--enable-cert-reload", "--cert-path=c", "--secure-serving=false"], "--enable-cert-reload has no effect"),
        (["--metrics-cert-dir=c"], "anyone can read the port's pages"),
    ],
)
def test_tls_that_does_less_than_it_seems_gets_a_warning(args: list[str], text: str) -> None:
    (line,) = warned(*args)
    assert text in line


@pytest.mark.parametrize("given", ["fairnes", "all,none", "none,slo"])
def test_headers_to_trust_are_named_or_all_or_none(given: str) -> None:
    (line,) = refused(f"--trust-client-headers={given}")
    assert "--trust-client-headers" in line


def test_fewer_workers_at_most_than_at_first_are_refused() -> None:
    (line,) = refused("--workers=4", "--workers-max=3")
    assert line == "error: --workers-max 3 is below --workers 4; give at least 4, or fewer workers"


def test_all_refusals_come_at_once() -> None:
    assert (
        len(
            refused(
                "--instance=a/b", "--client-ca-file=c", "--secure-serving=false", "--config-file=a", "--config-text=b"
            )
        )
        == 3
    )


def test_what_grpc_does_otherwise_is_said_once_and_what_it_would_ignore_is_refused() -> None:
    (line,) = warned("--transport=grpcio", "--tls-min-version=VersionTLS12")
    assert line.startswith("warning: --transport grpcio: connections are spread over workers by chance; ")
    lines = refused("--transport=grpcio", "--tls-min-version=VersionTLS13", "--tls-cipher-suites=A")
    assert [line.split(" cannot be set for --transport grpcio: ")[0] for line in lines] == [
        "error: --tls-min-version",
        "error: --tls-cipher-suites",
    ]


@pytest.mark.parametrize(
    "flag",
    [
        "--tracing=true", "--tracing", "--enable-pprof",
        "--refresh-prometheus-metrics-interval=1s", "--metrics-staleness-threshold=3s", "--zap-devel", "--zap-stacktrace-level=error",
        "--zap-time-encoding=epoch",
    ],
)  # fmt: skip
def test_what_changes_nothing_is_accepted_with_one_warning(flag: str) -> None:
    (line,) = warned(flag)
    assert line.startswith(f"warning: {flag.partition('=')[0]} has no effect: ")


@pytest.mark.parametrize(
    "flag",
    [*(f"--{u.name}=false" for u in UNSUPPORTED if False in u.silent), "--pool-group=other", "--endpoint-selector=",
     "--metrics-staleness-threshold=2s", "--zap-time-encoding=iso8601"],
)  # fmt: skip
def test_what_holds_anyway_is_accepted_without_a_word(flag: str) -> None:
    assert warned(flag) == []


def test_a_variable_that_is_nearly_a_flags_is_said_and_those_of_services_and_others_are_not() -> None:
    services = {
        "EPP_WORKER_PORT": "tcp://1.2.3.4:1",
        "EPP_WORKERS_SERVICE_PORT_GRPC": "1",
        "EPP_IMAGE": "x",
        "EPP_WORKERS": "3",
    }
    assert ok(env=services).workers == 3
    result, options = run(env={"EPP_WROKERS": "3"})
    assert options is not None
    assert (
        result.stderr == "warning: EPP_WROKERS has no effect: it is no flag's variable (did you mean 'EPP_WORKERS'?)\n"
    )


def test_a_flag_that_is_given_twice_is_said_and_the_last_counts() -> None:
    @click.command(cls=Once)
    @serve_options
    def command(options: Options) -> None:
        click.echo(options.workers)

    result = CliRunner().invoke(command, ["-w", "2", "--v=2", "--workers=3"])
    assert (result.stdout, result.stderr) == ("3\n", "warning: --workers is given 2 times; the last counts\n")


def test_a_scrape_interval_in_which_everything_grows_stale_is_refused() -> None:
    (line,) = refused("--refresh-metrics-interval=601s")
    assert line == "error: --refresh-metrics-interval 601s is above the maximum, 600s"


def test_a_scrape_interval_below_the_minimum_is_raised_with_a_warning() -> None:
    result, options = run("--refresh-metrics-interval=10ms")
    assert options is not None
    assert options.scrape_interval_s == 0.05
    assert result.stderr == "warning: --refresh-metrics-interval 0.01s is below the minimum; it is 0.05s\n"


@pytest.mark.parametrize(
    "flag",
    [
        "--grpc-port=70000",
        "--grpc-port=x",
        "--secure-serving=maybe",
        "--drain-timeout=5",
        "--drain-timeout=-5s",
        "--workers=0",
        "--poolName=x",
        "--body-limit=-1",
        "-v=x",
        "--endpoint-target-ports=a",
        "--transport=h3",
    ],
)
def test_what_cannot_be_read_is_a_usage_error(flag: str) -> None:
    result, _ = run(flag)
    assert result.exit_code == ExitCode.USAGE
    assert flag.split("=")[0].lstrip("-") in result.stderr
