import re
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from shm.prefix_index import IndexSchema
from tests.cases import cases
from workers.cli.flags import Grouped, Once
from workers.cli.serve_flags import COMMON, FLAGS, INDEX_ENTRIES_MIN, NO_EFFECT, REFUSED, REPLACED, UNSUPPORTED
from workers.cli.serve_options import serve_options
from workers.host.cgroup import available, default_workers
from workers.host.exit_codes import ExitCode
from workers.host.options import Options

Env = dict[str, str | None]

DEFAULT = ("fairness", "objective", "ttl", "slo", "model", "if-available")


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


def test_the_defaults_are_those_of_the_struct_except_the_number_of_workers() -> None:
    assert ok() == Options(workers=default_workers(available()))


@cases(
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
        (["--metrics-staleness-threshold=5s"], "metrics_staleness_threshold_s", 5.0),
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
        ([], "trust_client_headers", DEFAULT),
        (["--trust-client-headers=all"], "trust_client_headers", (*DEFAULT, "debug")),
        (["--trust-client-headers=none"], "trust_client_headers", ()),
        (["--trust-client-headers=slo,fairness"], "trust_client_headers", ("fairness", "slo")),
        (["--trust-client-headers=gateway"], "trust_client_headers", ("gateway", *DEFAULT)),
        (["--trust-client-headers=debug,gateway"], "trust_client_headers", ("gateway", "debug")),
        (["--enable-grpc-stream-metrics"], "enable_grpc_stream_metrics", True),
        (["--metrics-legacy-names=false"], "metrics_legacy_names", False),
        (["--enable-cert-reload", "--cert-path=certs"], "enable_cert_reload", True),
        (["--client-ca-file=ca.pem"], "client_ca_file", "ca.pem"),
        (["--metrics-cert-dir=certs", "--metrics-client-ca-file=ca.pem"], "metrics_cert_dir", "certs"),
        (["--health-checking"], "health_checking", True),
    ],
)  # fmt: skip
def test_flags_are_written_as_in_the_reference(args: list[str], field: str, value: Any) -> None:
    assert getattr(ok(*args), field) == value


def test_the_smallest_accepted_index_can_be_made_and_a_smaller_one_is_a_usage_error() -> None:
    assert IndexSchema(ok(f"--index-entries={INDEX_ENTRIES_MIN}").index_entries).entries == INDEX_ENTRIES_MIN
    result, _ = run(f"--index-entries={INDEX_ENTRIES_MIN - 1}")
    assert result.exit_code == ExitCode.USAGE
    assert f"x>={INDEX_ENTRIES_MIN}" in result.stderr


def test_port_0_means_any_free_port_and_the_process_names_the_instance() -> None:
    assert ok("--grpc-port=0").instance.startswith("epp-pid")


def test_every_flag_has_an_environment_variable_and_the_command_line_wins() -> None:
    env: Env = {"EPP_GRPC_PORT": "1", "EPP_SECURE_SERVING": "false", "EPP_MAX_ENDPOINTS": "7", "EPP_POOL_NAMESPACE": "a", "NAMESPACE": "b"}
    options = ok("--grpc-port=2", env=env)
    assert (options.grpc_port, options.secure_serving, options.max_endpoints, options.pool_namespace) == (2, False, 7, "a")


def test_variables_that_kubernetes_sets_are_honoured_or_ignored() -> None:
    env: Env = {"NAMESPACE": "inference", "POD_NAME": "my-epp-5d8f9c-x2x4z", "EPP_METRICS_PORT": "tcp://10.0.0.1:9090", "EPP_GRPC_PORT": ""}
    options = ok(env=env)
    assert (options.pool_namespace, options.pool_name, options.metrics_port, options.grpc_port) == ("inference", "my-epp", 9090, 9002)
    assert ok(env={"POD_NAME": "short"}).pool_name == "epp"


@cases(
    ("flag", "text"),
    [
        ("--endpoint-target-ports=8000,8001", "has no effect without --endpoint-selector"),
        ("--metrics-client-ca-file=ca.pem", "give --metrics-cert-dir too"),
        ("--tls-min-version=TLS9", "use VersionTLS12 or VersionTLS13"),
        ("--grpc-max-send-msg-size=1Ki", "is too small"),
        ("--grpc-max-recv-msg-size=10m", "is too small"),
        ("--zap-log-level=loud", "is not known; give debug, info"),
        ("--instance=a/b", "has a slash"),
        *((f"--{name}=x", "deprecated and cannot be used; use engineConfigs") for name in REPLACED),
    ],
)  # fmt: skip
def test_values_that_would_be_ignored_are_refused(flag: str, text: str) -> None:
    (line,) = refused(flag)
    assert line.startswith("error: --")
    assert text in line


POD: Env = {"POD_NAME": "my-epp-5d8f9c-x2x4z"}
SELECTED = ("--endpoint-selector=app=vllm,tier in (a, b),!canary", "--endpoint-target-ports=8000,8001,8000")


def test_pods_are_selected_by_labels_and_the_deployment_names_the_pool() -> None:
    options = ok(*SELECTED, env=POD)
    assert options.endpoint_selector == "app=vllm,tier in (a, b),!canary"
    assert (options.endpoint_target_ports, options.pool_name, options.pool_given) == ((8000, 8001), "my-epp", False)


def test_a_given_pool_name_differs_from_one_of_the_deployment() -> None:
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
        ((SELECTED[0], "--endpoint-target-ports=0"), POD, "0 is out of range; give 1 to 65535"),
        (("--endpoint-selector=a in b", SELECTED[1]), POD, "--endpoint-selector: 'a in b' does not start with a term"),
    ],
)
def test_a_selector_that_cannot_work_is_refused(args: tuple[str, ...], env: Env, text: str) -> None:
    (line,) = refused(*args, env=env)
    assert text in line


def test_by_default_leader_election_is_off_and_tokens_are_required_in_kubernetes() -> None:
    options = ok("--pool-name=p")
    assert (options.ha_enable_leader_election, options.metrics_endpoint_auth) == (False, None)
    options = ok("--pool-name=p", "--ha-enable-leader-election", "--metrics-endpoint-auth=false")
    assert (options.ha_enable_leader_election, options.metrics_endpoint_auth) == (True, False)


def test_tls_on_the_metrics_port_is_enough_if_tokens_are_required() -> None:
    assert warned("--metrics-cert-dir=c", "--pool-name=p") == []
    (line,) = warned("--metrics-cert-dir=c", "--pool-name=p", "--metrics-endpoint-auth=false")
    assert "any client can read the port's pages" in line


def test_client_certificates_without_tls_are_refused() -> None:
    (line,) = refused("--client-ca-file=ca.pem", "--secure-serving=false")
    assert line.startswith("error: --client-ca-file needs TLS")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--enable-cert-reload"], "--enable-cert-reload has no effect"),
        (
            ["--enable-cert-reload", "--cert-path=c", "--secure-serving=false"],
            "warning: --cert-path and --enable-cert-reload have no effect: --secure-serving is false",
        ),
        (["--tls-min-version=VersionTLS13", "--secure-serving=false"], "--tls-min-version has no effect"),
        (["--metrics-cert-dir=c"], "any client can read the port's pages"),
    ],
)
def test_tls_flags_with_less_effect_than_expected_get_a_warning(args: list[str], text: str) -> None:
    (line,) = warned(*args)
    assert text in line


@pytest.mark.parametrize("given", ["fairnes", "all,none", "none,slo", "none,gateway", "all,gateway"])
def test_invalid_groups_of_trusted_headers_are_refused(given: str) -> None:
    (line,) = refused(f"--trust-client-headers={given}")
    assert "--trust-client-headers" in line


def test_a_maximum_below_the_number_of_workers_is_refused() -> None:
    (line,) = refused("--workers=4", "--workers-max=3")
    assert line == "error: --workers-max 3 is below --workers 4; give at least 4, or fewer workers"


def test_all_errors_come_at_once() -> None:
    assert len(refused("--instance=a/b", "--client-ca-file=c", "--secure-serving=false", "--config-file=a", "--config-text=b")) == 3


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--grpc-port=9090"], "error: --grpc-port and --metrics-port have the same port 9090; give each of them its own"),
        (
            ["--grpc-port=7", "--grpc-health-port=7", "--metrics-port=7"],
            "error: --grpc-port and --grpc-health-port and --metrics-port have the same port 7; give each of them its own",
        ),
    ],
)
def test_a_port_for_two_flags_is_refused_with_one_message(args: list[str], text: str) -> None:
    assert refused(*args) == [text]
    assert ok("--grpc-port=0", "--grpc-health-port=0", "--metrics-port=0").metrics_port == 0


def test_errors_and_warnings_about_a_value_from_the_environment_name_its_variable() -> None:
    result, _ = run(env={"EPP_GRPC_PORT": "x"})
    assert "'--grpc-port' (from the environment variable EPP_GRPC_PORT)" in result.stderr
    result, _ = run("--pool-namespace=a", "--grpc-port=x", env={"NAMESPACE": "b"})
    assert "environment variable" not in result.stderr
    (line,) = refused("--workers=4", env={"EPP_WORKERS_MAX": "3"})
    assert line.endswith("(--workers-max comes from the environment variable EPP_WORKERS_MAX)")
    result, _ = run(env={"EPP_ENABLE_CERT_RELOAD": "1"})
    assert "(--enable-cert-reload comes from the environment variable EPP_ENABLE_CERT_RELOAD)" in result.stderr


def serving() -> click.Command:
    @click.command(cls=Grouped, common=COMMON)
    @serve_options
    def command(options: Options) -> None:
        raise AssertionError

    return command


def test_the_short_help_has_the_flags_that_most_need() -> None:
    shown = CliRunner().invoke(serving(), ["--help"]).stdout
    found = re.findall(r"^  (?:-\w, )?--([a-z-]+)", shown, re.MULTILINE)
    assert sorted(found) == sorted([*COMMON, "help-all"])


def test_the_help_has_groups_and_variables_and_flags_without_effect_come_last() -> None:
    shown = CliRunner().invoke(serving(), ["--help-all"]).stdout
    headings = re.findall(r"^(\S.*):$", shown, re.MULTILINE)
    assert headings[0] == "Configuration"
    assert headings[-3:] == [NO_EFFECT, REFUSED, "Other options"]
    shown = " ".join(shown.split())
    dead = shown[shown.index(NO_EFFECT) :]
    assert all(f"--{name} " in dead for name in (*REPLACED, *(each.name for each in UNSUPPORTED)))
    assert "[env var: EPP_POOL_NAMESPACE, NAMESPACE]" in shown
    assert shown.count("env var: EPP_") == len(FLAGS)


def test_grpcio_gets_one_warning_and_flags_that_it_would_ignore_are_refused() -> None:
    (line,) = warned("--transport=grpcio", "--tls-min-version=VersionTLS12")
    assert line.startswith("warning: --transport grpcio: connections are spread over workers at random; ")
    lines = refused("--transport=grpcio", "--tls-min-version=VersionTLS13", "--tls-cipher-suites=A")
    assert [line.split(" cannot be set for --transport grpcio, ")[0] for line in lines] == [
        "error: --tls-min-version",
        "error: --tls-cipher-suites",
    ]


@pytest.mark.parametrize(
    "flag",
    [
        "--tracing=true", "--tracing",
        "--refresh-prometheus-metrics-interval=1s", "--zap-devel", "--zap-stacktrace-level=error",
        "--zap-time-encoding=epoch",
    ],
)  # fmt: skip
def test_a_flag_that_changes_nothing_gets_one_warning(flag: str) -> None:
    (line,) = warned(flag)
    assert line.startswith(f"warning: {flag.partition('=')[0]} has no effect: ")


@pytest.mark.parametrize(
    "flag",
    ["--zap-devel=false", "--pool-group=other", "--endpoint-selector=",
     "--metrics-staleness-threshold=2s", "--zap-time-encoding=iso8601"],
)  # fmt: skip
def test_a_value_that_holds_anyway_gets_no_warning(flag: str) -> None:
    assert warned(flag) == []


def test_profiles_are_served_unless_the_flag_says_no() -> None:
    assert ok().enable_pprof is True and ok("--enable-pprof").enable_pprof is True
    assert ok("--enable-pprof=false").enable_pprof is False


def test_a_staleness_threshold_below_the_minimum_gets_a_warning() -> None:
    assert warned("--metrics-staleness-threshold=500ms") == ["warning: --metrics-staleness-threshold 0.5s is below the minimum; 2s is used"]


def test_a_misspelt_variable_gets_a_warning_and_other_variables_do_not() -> None:
    services = {"EPP_WORKER_PORT": "tcp://1.2.3.4:1", "EPP_WORKERS_SERVICE_PORT_GRPC": "1", "EPP_IMAGE": "x", "EPP_WORKERS": "3"}
    assert ok(env=services).workers == 3
    result, options = run(env={"EPP_WROKERS": "3"})
    assert options is not None
    assert result.stderr == "warning: EPP_WROKERS has no effect: no flag has this variable (did you mean 'EPP_WORKERS'?)\n"


def test_a_repeated_flag_gets_a_warning_and_the_last_one_counts() -> None:
    @click.command(cls=Once)
    @serve_options
    def command(options: Options) -> None:
        click.echo(options.workers)

    result = CliRunner().invoke(command, ["-w", "2", "--v=2", "--workers=3"])
    assert (result.stdout, result.stderr) == ("3\n", "warning: --workers is given 2 times; the last one is used\n")


def test_a_scrape_interval_above_the_maximum_is_refused() -> None:
    (line,) = refused("--metrics-staleness-threshold=2h")
    assert line == "error: --metrics-staleness-threshold 7200s is above the maximum, 3600s"
    (line,) = refused("--refresh-metrics-interval=601s")
    assert line == "error: --refresh-metrics-interval 601s is above the maximum, 600s"


def test_a_scrape_interval_below_the_minimum_is_raised_with_a_warning() -> None:
    result, options = run("--refresh-metrics-interval=10ms")
    assert options is not None
    assert options.scrape_interval_s == 0.05
    assert result.stderr == "warning: --refresh-metrics-interval 0.01s is below the minimum; 0.05s is used\n"


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
def test_an_unreadable_value_is_a_usage_error(flag: str) -> None:
    result, _ = run(flag)
    assert result.exit_code == ExitCode.USAGE
    assert flag.split("=")[0].lstrip("-") in result.stderr


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--grpc-port=x", "'x' is not a whole number from 0 to 65535"),
        ("--workers=2.5", "'2.5' is not a whole number from 1"),
        ("--v=much", "'much' is not a whole number"),
    ],
)
def test_text_in_place_of_a_number_is_refused_with_the_limits(flag: str, message: str) -> None:
    result, _ = run(flag)
    assert result.exit_code == ExitCode.USAGE
    assert message in result.stderr


def test_a_replica_store_gets_a_prefix_of_namespace_and_pool() -> None:
    options = ok("--replica-store=redis://cache", "--pool-name=p", "--pool-namespace=n")
    assert options.replica_store_prefix == "epp:n:p"
    assert ok("--replica-store=redis://cache", "--replica-store-prefix=mine").replica_store_prefix == "mine"
    assert ok().replica_store_prefix == ""
    several = ok("--replica-store=redis://cache", "--pool-name=a,b", "--pool-ports=9101", "--pool-namespace=n")
    assert several.replica_store_prefix == "epp:n:pools"
    in_pod = {"POD_NAME": "router-5d8f-x1y2z"}
    assert ok("--replica-store=redis://cache", "--pools-file=f", env=in_pod).replica_store_prefix == "epp:default:router"


@pytest.mark.parametrize(
    ("args", "rule"),
    [
        (["--replica-store=http://cache"], "--replica-store: the URL must begin with"),
        (["--replica-store=redis://:secret7@c", "--replica-store-password-file=f"], "given in two places"),
        (["--replica-store=redis://c", "--replica-store-prefix=a*"], "--replica-store-prefix 'a*'"),
        (["--replica-store=redis://c", "--replica-name=a b"], "--replica-name 'a b'"),
    ],
)
def test_flags_of_replicas_that_cannot_work_are_refused(args: list[str], rule: str) -> None:
    (line,) = refused(*args)
    assert rule in line
    assert "secret7" not in line


def test_flags_of_replicas_without_a_store_have_no_effect() -> None:
    assert warned("--replica-name=a") == ["warning: --replica-name: no effect without --replica-store"]


def test_the_variable_with_the_password_of_the_store_is_known() -> None:
    assert ok("--replica-store=redis://c", env={"EPP_REPLICA_STORE_PASSWORD": "x"}).replicas_max == 8


FOUND = ("--service-name=epp", "--pool-ports=9002,9100-9102")


def test_several_pools_are_found_by_a_service_or_by_their_names() -> None:
    options = ok(*FOUND)
    assert (options.service_name, options.pool_ports, options.finds_pools) == ("epp", (9002, 9100, 9101, 9102), True)
    options = ok("--pool-name=a", "--pool-name=b", "--pool-ports=9100-9101", "--config-dir=c")
    assert (options.pool_names, options.config_dir, options.finds_pools) == (("a", "b"), "c", True)
    assert ok(env={"EPP_POOL_NAME": "a b", "EPP_POOL_PORTS": "1,2"}).pool_names == ("a", "b")
    assert not ok("--pool-name=a").finds_pools


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--pool-name=a", "--pool-ports=9100"), "--pool-ports has no effect without --service-name or several --pool-name"),
        (("--config-dir=c",), "--config-dir has no effect without"),
        ((*FOUND, "--pool-name=a"), "--service-name and --pool-name cannot be set at the same time"),
        ((*FOUND, "--pools-file=p"), "--service-name and --pools-file cannot be set at the same time"),
        ((*FOUND, "--endpoints=a:1"), "--service-name and --endpoints cannot be set at the same time"),
        ((*FOUND, "--transport=grpcio"), "--service-name and --transport grpcio cannot be set at the same time"),
        (("--pool-name=a", "--pool-name=a", "--pool-ports=1"), "--pool-name 'a' is given twice"),
        (("--service-name=epp", "--pool-ports=9090"), "--pool-ports has the port of --metrics-port"),
        (("--service-name=epp", "--pool-ports=1-2000"), "--pool-ports has 2000 ports; give at most 1000"),
    ],
)
def test_flags_about_pools_that_are_found_must_fit(flags: tuple[str, ...], message: str) -> None:
    assert any(message in line for line in refused(*flags))


@pytest.mark.parametrize("flag", ["config-file", "state-dir", "plugin-path", "instance"])
def test_a_value_that_is_not_utf_8_is_refused_before_the_picker_records_it(flag: str) -> None:
    (line,) = refused(f"--{flag}=a\udcffb")
    assert line.startswith(f"error: --{flag} 'a\\udcffb' is not UTF-8")
