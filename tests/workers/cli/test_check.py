import json
import re
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from epp.config.control_headers import POWERS
from epp.config.findings import ERRORS, WARNINGS
from epp.config.load import load
from epp.request.client_headers import GROUPS, TRUSTED_BY_DEFAULT
from workers.cli import EARLIER, PICKER, added, main
from workers.cli import configuration as configuration_module
from workers.cli.configuration import check_endpoints, load_config, with_one_worker
from workers.cli.flags import BadConfiguration
from workers.cli.serve_options import serve_options
from workers.host.exit_codes import ExitCode
from workers.host.options import Options

GOOD = "plugins: [{type: queue-scorer}, {type: file-discovery, name: f, parameters: {path: e.yaml}}]\n"
GOOD += "dataLayer: {discovery: {endpoints: {pluginRef: f}}}\n"
BAD = "plugins:\n- type: queue-scorr\n- type: nothing-like-it\n"
WARNS = "plugins: [{type: queue-scorer, parameters: {a: 1}}]\n"
STRIPS = "--trust-client-headers=gateway"


PRECISE = "plugins: [{type: precise-prefix-cache-producer}, {type: prefix-cache-scorer}]\n"
CEL = """
plugins:
- type: request-attribute-reporter
  parameters: {attributes: [{key: {name: tokens}, expression: usage.prompt_tokens}]}
"""
POD = {"POD_NAME": "epp-1-2", "EPP_ENDPOINT_TARGET_PORTS": "8000"}


def check(*args: str, stdin: str | bytes | None = None, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, ["check", *args], input=stdin, env=env)


def test_a_valid_file_prints_the_effective_configuration_and_exits_0(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(GOOD)
    result = check(str(tmp_path / "c.yaml"), STRIPS)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert load(result.stdout, "again").as_yaml() == result.stdout


def test_what_clients_can_do_is_told_for_each_trusted_group_unless_the_gateway_removes_their_headers() -> None:
    told = check("-", stdin=GOOD)
    assert (told.exit_code, told.stderr.count("\n")) == (0, 1)
    assert told.stderr.startswith("<stdin>: note[client-headers]: headers that --trust-client-headers trusts let a client ")
    for group in GROUPS:
        assert (f"{POWERS[group]} ({group})" in told.stderr) == (group in TRUSTED_BY_DEFAULT)
    some = check("-", "--trust-client-headers=debug,slo", stdin=GOOD).stderr
    assert [group for group in GROUPS if f"({group})" in some] == ["slo", "debug"]
    for flag in ("--trust-client-headers=none", STRIPS, "--quiet"):
        assert check("-", flag, stdin=GOOD).stderr == ""
    assert check("-", "--trust-client-headers=all", "--strict", stdin=GOOD).exit_code == 0, "a note is no mistake"
    assert check("-", "--trust-client-headers=everything", stdin=GOOD).exit_code == 78
    (note,) = json.loads(check("-", "--json", stdin=GOOD).stdout)["findings"]
    assert (note["severity"], note["rule"]) == ("note", "client-headers")


def test_all_errors_are_printed_like_compiler_messages_and_the_exit_code_is_78(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(BAD)
    result = check(str(file))
    assert result.exit_code == ExitCode.CONFIG == 78
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        f"{file}:2:9: error[unknown-type]: plugin type 'queue-scorr' is not registered (did you mean 'queue-scorer'?)",
        f"{file}:3:9: error[unknown-type]: plugin type 'nothing-like-it' is not registered "
        "('epp config plugins' lists the available types)",
    ]


def test_standard_input_is_a_dash() -> None:
    assert check("-", stdin=GOOD).exit_code == 0
    assert check("-", stdin=BAD).stderr.startswith("<stdin>:2:9: error[unknown-type]")


def test_warnings_go_to_stderr_and_quiet_prints_errors_only() -> None:
    result = check("-", stdin=WARNS)
    assert result.exit_code == 0
    assert result.stderr.startswith("<stdin>:1:44: warning[parameters-ignored]: ")
    quiet = check("--quiet", "-", stdin=WARNS)
    assert (quiet.exit_code, quiet.output) == (0, "")
    both = WARNS + "x: 1"
    assert "warning" in check("-", stdin=both).stderr
    assert "warning" not in check("-q", "-", stdin=both).stderr


def test_json_has_all_findings_in_the_order_of_the_text_and_the_effective_configuration() -> None:
    good = json.loads(check("--json", "-", STRIPS, stdin=WARNS).stdout)
    assert [finding["rule"] for finding in good["findings"]] == ["parameters-ignored"]
    assert good["effective"]["kind"] == "EndpointPickerConfig"
    result = check("--json", "-", stdin=BAD + "flowControl: {maxBytes: 1Gi}\n")
    assert result.exit_code == 78
    bad = json.loads(result.stdout)
    assert bad["effective"] is None
    assert [(f["severity"], f["line"]) for f in bad["findings"]] == [("error", 2), ("error", 3), ("warning", 4)]
    assert bad["findings"][0] == {
        "severity": "error", "file": "<stdin>", "line": 2, "column": 9, "rule": "unknown-type",
        "message": "plugin type 'queue-scorr' is not registered", "hint": "did you mean 'queue-scorer'?",
    }  # fmt: skip


def test_migrate_prints_the_file_in_its_current_form_and_the_findings_about_that(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("apiVersion: llm-d.ai/v1alpha1  # old\n" + GOOD.replace("endpoints: {pluginRef: f}", "pluginRef: f"))
    result = check("--migrate", "--strict", STRIPS, str(tmp_path / "c.yaml"))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("apiVersion: llm-d.ai/v1  # old\n")
    assert "dataLayer: {discovery: {endpoints: {pluginRef: f}}}" in result.stdout
    stays = check("--migrate", "-", stdin="plugins: [{type: by-label, parameters: {label: a, validValues: [''], allowsNoLabel: true}}]")
    assert "<stdin>: not migrated: plugin type 'by-label' stays" in stays.stderr
    assert check("--migrate", "-", stdin="a: [").exit_code == 78


@pytest.mark.parametrize(
    ("flag", "code"),
    [
        ("--allow-experimental-plugins", 0),
        ("--allow-experimental-plugins=true", 0),
        ("--allow-experimental-plugins=1", 0),
        ("--allow-experimental-plugins=false", 78),
        ("-q", 78),
    ],
)
def test_experimental_types_are_accepted_as_the_flag_says_and_the_file_is_never_taken_for_its_value(
    tmp_path: Path, flag: str, code: int
) -> None:
    (tmp_path / "c.yaml").write_text("plugins: [{type: session-affinity-scorer}, {type: queue-scorer}]\n")
    assert check(flag, str(tmp_path / "c.yaml")).exit_code == code


def test_strict_counts_warnings_as_errors() -> None:
    result = check("--strict", "-", stdin=WARNS)
    assert (result.exit_code, result.stdout) == (78, "")
    assert "warning[parameters-ignored]" in result.stderr
    assert "warning[parameters-ignored]" in check("--strict", "-q", "-", stdin=WARNS).stderr
    assert check("--strict", "-", stdin=GOOD).exit_code == 0
    assert json.loads(check("--strict", "--json", "-", stdin=WARNS).stdout)["effective"] is not None


def test_all_rules_are_printed_with_their_meanings_and_no_file_is_needed() -> None:
    result = check("--rules")
    assert result.exit_code == 0
    lines = [line.split(maxsplit=2) for line in result.stdout.splitlines()]
    assert {rule: text for severity, rule, text in lines if severity == "error"} == ERRORS
    assert {rule: text for severity, rule, text in lines if severity == "warning"} == WARNINGS


def test_lint_uses_the_flags_for_epp_serve() -> None:
    text = GOOD + "flowControl: {maxBytes: 40Mi}\n"
    assert "limit-below-body" not in check("-", stdin=text).stderr
    assert "limit-below-body" in check("--body-limit", "64MiB", "-", stdin=text).stderr


def test_the_limit_on_waiting_bytes_is_compared_with_the_memory_limit() -> None:
    text = GOOD + "featureGates: [flowControl]\nflowControl: {maxBytes: 400Mi}\n"
    assert "limit-above-memory" not in check("-", stdin=text).stderr
    assert "limit-above-memory" not in check("--memory-limit", "1GiB", "-", stdin=text).stderr
    assert "limit-above-memory" in check("--memory-limit", "256MiB", "-", stdin=text).stderr


def test_an_unreadable_file_is_a_configuration_error_with_its_path(tmp_path: Path) -> None:
    result = check(str(tmp_path / "none.yaml"))
    assert (result.exit_code, result.stderr) == (78, f"{tmp_path}/none.yaml: error[unreadable]: No such file or directory\n")
    assert check(str(tmp_path)).stderr == f"{tmp_path}: error[unreadable]: Is a directory\n"
    assert check("-", stdin=b"a: \xff").stderr == "<stdin>: error[unreadable]: not UTF-8 at byte 3\n"


def test_an_unreadable_file_is_a_finding_in_json_too(tmp_path: Path) -> None:
    result = check("--json", str(tmp_path))
    (finding,) = json.loads(result.stdout)["findings"]
    assert (result.exit_code, finding["rule"], finding["file"]) == (78, "unreadable", str(tmp_path))


def test_a_byte_order_mark_is_ignored() -> None:
    assert check("-q", "-", stdin=b"\xef\xbb\xbf" + GOOD.encode()).exit_code == 0


def test_a_file_that_is_too_long_is_not_read_to_its_end() -> None:
    result = check("-", stdin="#" * (5 << 20))
    assert result.exit_code == 78
    assert "error[too-large]" in result.stderr


def test_a_broken_plugin_module_is_an_error_of_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object, **_kwargs: object) -> None:
        raise configuration_module.PluginImportError("plugin module epp.plugins.x cannot be imported: SyntaxError")

    monkeypatch.setattr("epp.config.registry.find", broken)
    result = check("-", stdin=GOOD)
    assert result.exit_code == ExitCode.FAULT
    assert "epp.plugins.x" in result.stderr


# API keys of tenants


def with_keys(file: Path) -> str:
    return f"{GOOD}tenants:\n  from:\n  - apiKey: {{header: authorization, file: {file}}}\n"


def test_wrong_keys_are_errors_of_their_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("acme sk-secret\n")
    result = check("-", STRIPS, stdin=with_keys(tmp_path / "keys"))
    assert result.exit_code == ExitCode.CONFIG
    assert result.stderr.startswith(f"{tmp_path}/keys:1:1: error[tenant-keys]: there is no hash of a key (write TENANT sha256:HEX")
    assert "sk-secret" not in result.output
    assert "error[tenant-keys]" in refused(Options(config_text=with_keys(tmp_path / "keys")))


def test_a_file_of_keys_that_is_missing_is_a_warning_for_check_and_an_error_for_serve(tmp_path: Path) -> None:
    result = check("-", STRIPS, stdin=with_keys(tmp_path / "keys"))
    assert result.exit_code == ExitCode.OK
    assert f"<stdin>:5:43: warning[keys-unread]: the file {tmp_path}/keys cannot be read: No such file" in result.stderr
    assert check("-", STRIPS, "--strict", stdin=with_keys(tmp_path / "keys")).exit_code == ExitCode.CONFIG
    assert "--config-text:5:43: error[tenant-keys]: the file" in refused(Options(config_text=with_keys(tmp_path / "keys")))


def test_cache_salts_need_a_secret_that_lasts() -> None:
    text = GOOD + "tenants: {from: [{header: x-tenant, trusted: true}], cacheSalt: tenant}\n"
    why = "--config-text:3:65: error[tenants]: tenants.cacheSalt: without a secret that lasts"
    assert refused(Options(config_text=text)).startswith(why)
    for lasts in ({"prefix_secret_file": "s"}, {"state_dir": "d"}, {"replica_store": "r"}):
        assert load_config(Options(config_text=text, **lasts)).tenants is not None  # type: ignore[arg-type]
    assert check("-", STRIPS, stdin=text).exit_code == ExitCode.OK  # the flags of the picker are not known
    assert check("-", STRIPS, "--endpoints=a:1", stdin=text).exit_code == ExitCode.CONFIG
    assert check("-", STRIPS, "--endpoints=a:1", "--state-dir=d", stdin=text).exit_code == ExitCode.OK


def test_with_tenants_no_client_queues_as_another_one() -> None:
    tenants = "tenants: {from: [{header: x-tenant, trusted: true}]}\n"
    told = check("-", stdin=GOOD + tenants).stderr
    assert "(objective)" in told and "(fairness)" not in told


# What `epp serve` loads


def refused(options: Options) -> str:
    with pytest.raises(BadConfiguration) as caught:
        load_config(options)
    assert caught.value.exit_code == 78
    return caught.value.message


def test_serve_loads_a_file_or_text_and_prints_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(GOOD)
    assert load_config(Options(config_file=str(tmp_path / "c.yaml"))).discovery is not None
    assert load_config(Options(config_text=WARNS, endpoints="a:1")).discovery is None
    assert "--config-text:1:44: warning[parameters-ignored]" in capsys.readouterr().err


def test_without_a_configuration_the_built_in_one_is_used() -> None:
    config = load_config(Options(endpoints="a:1"))
    profile = config.pipeline.profiles["default"]
    assert sorted(weight for _, weight in (*profile.scorers, *profile.static_scorers)) == [1.0]
    assert "learned-latency-scorer" in config.parameters


def test_endpoints_must_have_exactly_one_source() -> None:
    assert "give --endpoints host:port,..., a file-discovery plugin" in refused(Options())
    assert "from plugin 'f' of --config-text and from --endpoint-selector" in refused(Options(config_text=GOOD, endpoint_selector="a"))
    assert "from --endpoints and from --endpoint-selector" in refused(Options(endpoints="a:1", endpoint_selector="a"))


def test_a_pool_is_a_source_of_endpoints_or_just_a_name_beside_another_source() -> None:
    assert load_config(Options(pool_given=True)).discovery is None
    assert load_config(Options(endpoint_selector="a")).discovery is None
    assert load_config(Options(pool_given=True, endpoints="a:1")).discovery is None
    assert load_config(Options(pool_given=True, config_text=GOOD)).discovery is not None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pool_given": True, "pool_namespace": "a/b"}, "--pool-namespace 'a/b': a namespace has"),
        ({"endpoint_selector": "a", "pool_namespace": "A"}, "--pool-namespace 'A': a namespace has"),
        ({"pool_given": True, "pool_namespace": "a" * 64}, "a namespace has 1 to 63"),
        ({"pool_given": True, "pool_name": "a,metadata.namespace=b"}, "--pool-name 'a,metadata.namespace=b'"),
        ({"pool_given": True, "pool_name": "Pool"}, "a pool's name has"),
        ({"pool_given": True, "pool_name": "a" * 254}, "a pool's name has"),
    ],
)
def test_names_with_an_invalid_form_for_kubernetes_are_refused(given: dict[str, Any], message: str) -> None:
    assert message in refused(Options(**given))
    load_config(Options(**{**given, "endpoint_selector": ""}, endpoints="a:1"))


@pytest.mark.parametrize(("given", "place"), [({"endpoints": "a:1"}, "--endpoints"), ({"config_text": GOOD}, "plugin 'f'")])
def test_without_kubernetes_leader_election_is_refused_and_flags_about_tokens_get_a_warning(
    given: dict[str, str], place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(Options(**given, ha_enable_leader_election=True))
    assert "--ha-enable-leader-election needs Kubernetes, which keeps the lease" in text
    assert f"endpoints come from {place}" in text
    load_config(Options(**given, pool_given=True, metrics_endpoint_auth=True, debug_port_forward=True))
    warnings = capsys.readouterr().err
    assert "--metrics-endpoint-auth has no effect" in warnings and "--debug-port-forward has no effect" in warnings
    load_config(Options(**given))
    load_config(Options(endpoint_selector="a", ha_enable_leader_election=True, metrics_endpoint_auth=True, debug_port_forward=True))
    assert capsys.readouterr().err == ""


def test_endpoints_replace_the_discovery_plugin_of_a_configuration_with_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    options = Options(config_text=GOOD, endpoints="a:1")
    config = load_config(options)
    assert "notice: --endpoints replaces plugin 'f' of --config-text, which is not read" in capsys.readouterr().err
    check_endpoints(options, config)  # does not look for the plugin's file
    with pytest.raises(BadConfiguration, match=r"deploy/endpoints.yaml is a sample .* and --endpoints .* replaces it"):
        check_endpoints(Options(config_text=GOOD), config)


def test_a_plugin_that_keeps_its_state_in_one_worker_gets_one_with_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    text = GOOD.replace("[{type", "[{type: thunder-agent, name: thunder}, {type", 1) + "featureGates: [flowControl]\n"
    text += "flowControl: {saturationDetector: {pluginRef: thunder}, defaultPriorityBand: {fairnessPolicyRef: thunder}}\n"
    options = Options(config_text=text, workers=4, workers_max=8, allow_experimental_plugins=True)
    alone = with_one_worker(options, load_config(options))
    assert (alone.workers, alone.workers_max) == (1, 1)
    told = capsys.readouterr().err
    assert "notice: plugin 'thunder' keeps its state in one worker: the picker runs with 1 worker instead of 4" in told
    plain = Options(config_text=GOOD, workers=4)
    assert with_one_worker(plain, load_config(plain)) is plain
    assert capsys.readouterr().err == ""


def test_the_needs_of_kubernetes_are_checked_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    options, config = Options(pool_given=True), load_config(Options(pool_given=True))
    monkeypatch.setenv("KUBECONFIG", "/none")
    with pytest.raises(BadConfiguration, match="KUBECONFIG /none: no such file"):
        check_endpoints(options, config)
    check_endpoints(Options(pool_given=True, endpoints="a:1"), config)


@pytest.mark.parametrize(("module", "package", "given", "text"), [
    ("zmq", "pyzmq", ["--endpoints=a:1"], PRECISE),
    ("kubernetes_asyncio", "kubernetes-asyncio", ["--pool-name=p"], "{}"),
    ("grpc", "grpcio", ["--endpoints=a:1", "--transport=grpcio"], "{}"),
    ("redis", "redis", ["--endpoints=a:1", "--replica-store=redis://c"], "{}"),
    ("opentelemetry.sdk.trace", "OpenTelemetry", ["--endpoints=a:1"], "{}"),
    ("cel", "CEL", ["--endpoints=a:1"], CEL),
])  # fmt: skip
def test_a_package_that_serve_needs_is_an_error_of_check_with_the_same_text(
    module: str, package: str, given: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_text("apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\n" + text.removeprefix("{}"))
    if module.startswith("opentelemetry"):
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    before = check("-q", file, *given)
    assert before.exit_code == 0, before.stderr
    monkeypatch.setitem(sys.modules, module, None)
    if module == "cel":
        monkeypatch.setattr("epp.plugins.reporters.cel", None)
    checked = check("-q", file, *given)
    assert (checked.exit_code, checked.stdout) == (78, "")
    assert package in checked.stderr and "not installed" in checked.stderr
    assert re.search(r"pip install 'endpoint-picker\[[a-z0-9-]+\]'", checked.stderr)

    @click.command()
    @serve_options
    def serve(options: Options) -> None:
        load_config(options)

    served = CliRunner().invoke(serve, [f"--config-file={file}", *given])
    assert (served.exit_code, served.stderr.splitlines()[-1]) == (78, checked.stderr.splitlines()[-1])


def test_check_takes_the_flags_of_serve_and_refuses_what_serve_refuses(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(GOOD)
    file = str(tmp_path / "c.yaml")
    assert check("-q", file, "--ha-enable-leader-election", "--pool-name=p").exit_code == 78, "the plugin is the source"
    assert "error[two-discoveries]" in check("-q", file, "--endpoint-selector=a", env=POD).stderr
    assert "error[bad-name]" in check("-q", "-", "--pool-name=P_", stdin=WARNS).stderr
    assert "--tls-min-version 'x' is not supported" in check("-q", file, "--tls-min-version=x").stderr
    assert check("-q", file, "--config-text=x").exit_code == 2
    assert "--tls-min-version" not in check("--help").stdout


def test_check_reads_the_variables_of_serve() -> None:
    said = check("-q", "-", stdin=WARNS, env={"EPP_TLS_MIN_VERSION": "x"})
    assert said.exit_code == 78
    assert "--tls-min-version comes from the environment variable EPP_TLS_MIN_VERSION" in said.stderr


def test_a_bad_configuration_ends_serve_with_all_errors() -> None:
    assert len(refused(Options(config_text=BAD)).splitlines()) == 2


def test_help_lists_all_commands() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    picker, _, laboratory = result.stdout.partition("The laboratory:")
    assert all(f"  {name} " in picker for name in PICKER)
    assert all(f"  {name} " in laboratory for name in added())
    assert {"sim", "demo", "size"} <= set(added())


@pytest.mark.parametrize("earlier", EARLIER)
def test_an_earlier_name_of_a_command_still_works(earlier: str) -> None:
    said = CliRunner().invoke(main, [earlier, "--help"]).stdout
    now = CliRunner().invoke(main, [*EARLIER[earlier], "--help"]).stdout
    assert said.splitlines()[1:] == now.splitlines()[1:] != []


def test_record_without_a_command_records() -> None:
    refused = CliRunner().invoke(main, ["record", "--seconds=5", "--instance=none", "--run-dir=/nowhere"])
    assert (refused.exit_code, "no instance in /nowhere" in refused.stderr) == (1, True)
    assert "replay" in CliRunner().invoke(main, ["record", "--help"]).stdout


def test_objects_are_checked_with_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("apiVersion: llm-d.ai/v1alpha2\nkind: InferenceObjective\nspec: {priority: x}\n")
    found = check("-", f"--objects-dir={tmp_path}", stdin=GOOD)
    assert found.exit_code == 78
    assert "error[bad-object]" in found.stderr
    assert "a.yaml:1: InferenceObjective ''" in found.stderr
    rule = "{targets: [{modelRewrite: x, weight: 0}]}"
    text = f"apiVersion: llm-d.ai/v1alpha2\nkind: InferenceModelRewrite\nmetadata: {{name: r}}\nspec: {{rules: [{rule}]}}\n"
    (tmp_path / "a.yaml").write_text(text)
    found = check("-", f"--objects-dir={tmp_path}", stdin=GOOD)
    assert found.exit_code == 78
    assert "a.yaml:4: InferenceModelRewrite 'r': spec.rules[0].targets[0].weight: '0' is not" in found.stderr


def test_parts_of_objects_without_effect_get_warnings(tmp_path: Path) -> None:
    text = "apiVersion: llm-d.ai/v1alpha2\nkind: InferenceObjective\nmetadata: {name: gold}\nspec: {priorty: 10}\n"
    (tmp_path / "a.yaml").write_text(text + "---\napiVersion: llm-d.ai/v1alpha2\nkind: InferenceObjectiv\n")
    found = check("-", f"--objects-dir={tmp_path}", stdin=GOOD)
    assert found.exit_code == 0
    assert "warning[odd-object]" in found.stderr
    assert "a.yaml:1: InferenceObjective 'gold': spec.priorty is not a known field" in found.stderr
    assert "objects of kind InferenceObjectiv of llm-d.ai/v1alpha2 are not read here" in found.stderr
    assert check("-", "--strict", f"--objects-dir={tmp_path}", stdin=GOOD).exit_code == 78
