"""`epp doctor`: the options, the order of the checks, the report and the exit code."""

import json
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import msgspec

from workers.cli.configuration import add_plugins, plugin_path_option
from workers.cli.doctor import envoy_admin
from workers.cli.doctor.gateway import Peer, TlsNames, calls, client_header_findings, gateway_findings, picker_clusters, tls_names
from workers.cli.doctor.running import Running, ext_proc_ports, only, pools_of, running, vouches, waits_s
from workers.cli.doctor.servers import server_findings, unasked
from workers.cli.flags import DURATION, PORT, Whole, WithArguments
from workers.cli.output import echo, echo_lines, echo_text
from workers.cli.which import Named, check_pool, pool_option, port_options
from workers.host.exit_codes import ExitCode
from workers.shared import doctor_report
from workers.shared.doctor_report import DOCTOR, ERROR, Check, Finding, Report

NAMED_MAX: Final = 5
LABEL: Final = 8  # width of the first column


@click.command("doctor", cls=WithArguments)
@port_options
@pool_option
@click.option("--gateway-config", default="", metavar="FILE", help="Check this Envoy file, or dump of /config_dump.")
@click.option("--gateway-admin", default="", metavar="HOST:PORT", help="Check the Envoy with this admin port.")
@click.option("--tls-name", "tls_wanted", multiple=True, help="A name by which gateways verify the picker; repeatable.")
@click.option("--strict", is_flag=True, help="Count warnings as errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--kv-events", metavar="HOST[:PORT]", default=None, help="Read KV events of this endpoint instead.")
@click.option("--config-file", "-c", default="", help="KV events: take ports, topic, block size and model from this.")
@click.option("--replay-port", type=PORT, default=None, help="KV events: the port of the replay socket.")
@click.option("--topic", default=None, help="KV events: the beginning of the topics. [default: kv@]")
@click.option("--block-size", type=Whole(1, 65536), default=None, help="KV events: the block size to expect.")
@click.option("--model", default=None, help="KV events: the model to expect in the topics.")
@click.option("--events", type=Whole(1, 10_000), default=10, show_default=True, help="KV events: events to read.")
@click.option("--timeout", type=DURATION, default="10s", show_default=True, help="KV events: how long to wait.")
@plugin_path_option
def command(
    picker: Named,
    pool: str,
    gateway_config: str,
    gateway_admin: str,
    tls_wanted: tuple[str, ...],
    strict: bool,
    as_json: bool,
    kv_events: str | None,
    config_file: str,
    replay_port: int | None,
    topic: str | None,
    block_size: int | None,
    model: str | None,
    events: int,
    timeout: float,
    plugin_path: str,
) -> None:
    """Find what is wrong with a running picker, its model servers and its gateway. Each finding has its evidence and a fix.

    An Envoy with its admin port on this machine (9901, 19000 or 15000) is found without a flag. Run it in the picker's container. The
    page's Health view shows the findings, too, for an hour.

    With --kv-events, connect to an endpoint's event socket instead, read some KV events, or say what is wrong. Give the server
    requests meanwhile: an idle server publishes nothing.

    Exit code 0: no errors (with --strict: nothing at all); 1: errors were found; 2: wrong flags.
    """
    if kv_events is not None:
        from workers.cli.kv_probe import AskedEvents, follow

        add_plugins(plugin_path)
        asked = AskedEvents(topic, block_size, model, replay_port, events, timeout)
        sys.exit(follow(kv_events, config_file, asked))
    gateway = _gateway(gateway_config, gateway_admin)
    found = running(picker)
    if pool and found.state:
        check_pool(pool, [*pools_of(found.state), ""] if "pools" in found.state else ())
        found = only(found, pool)
    visit = Visit(found, gateway, tls_wanted)
    visit.make()
    if (seen := found.seen) is not None and not pool:
        with suppress(OSError):  # the page does not show the report of another user
            doctor_report.write(picker.run_dir, seen.name, seen.secret, visit.report(time.time()))
    findings = sorted([*found.findings, *visit.findings], key=lambda each: each.severity != ERROR)
    if as_json:
        echo_text(_json(findings, visit))
    else:
        _print(findings, visit)
    failed = bool(findings) if strict else any(each.severity == ERROR for each in findings)
    sys.exit(ExitCode.FAULT if failed else ExitCode.OK)


class Gateway(NamedTuple):
    """An Envoy. `config`: None if not known. `admin`: the address of its admin port, or "" if not known. `named`: whether a flag names this
    Envoy.
    """

    config: Any = None
    admin: str = ""
    named: bool = True


class Visit:
    """Makes the checks that the picker itself cannot make. `found`: the findings of each check. `skipped`: skipped checks and reasons."""

    def __init__(self, picker: Running, gateway: Gateway, tls_wanted: Sequence[str]) -> None:
        self._picker = picker
        self._gateway = gateway
        self._config = gateway.config
        self._tls_wanted = tls_wanted
        self.found: dict[str, list[Finding]] = {}
        self.skipped: dict[str, str] = {}

    def make(self) -> None:
        """Makes all possible checks."""
        picker, config = self._picker, self._config
        answers = bool(picker.state)
        silent = "" if answers else "no picker answers"
        self._check("picker", silent, list)
        self._servers(silent)
        tls = picker.flag("secure-serving") != "false"
        ports = ext_proc_ports(picker)
        peer = Peer(tls=tls, waits_s=waits_s(picker.state) if answers else 0.0, ports=ports)
        unknown = "" if config is not None else "give --gateway-admin HOST:PORT or --gateway-config FILE"
        if config is not None and not self._gateway.named and not calls(config, ports):
            unknown = f"the Envoy at {self._gateway.admin} does not call this picker"
        self._check("gateway", unknown, lambda: [*gateway_findings(config, peer), *self._counted(ports)])
        trust, vouched = picker.flag("trust-client-headers"), answers and vouches(picker.state)
        self._check("client headers", silent, lambda: client_header_findings(trust, None if unknown else config, ports, tenants=vouched))
        self._check("tls", silent or self._tls_skipped(tls=tls), self._tls)
        self._check("access", silent or self._access_skipped(), self._access)

    @property
    def findings(self) -> list[Finding]:
        return [each for found in self.found.values() for each in found]

    def report(self, at: float) -> Report:
        """Returns the report for the page: the findings of this command besides the picker's own findings."""
        return {name: Check(at, [msgspec.structs.replace(each, found_by=DOCTOR) for each in found]) for name, found in self.found.items()}

    def _check(self, name: str, skipped: str, check: Callable[[], list[Finding]]) -> None:
        if skipped:
            self.skipped[name] = skipped
            return
        self.found[name] = check()

    def _servers(self, silent: str) -> None:
        """Checks the model servers, and says which pools are left out."""
        state = self._picker.state
        left_out = {} if silent else unasked(state)
        every = {each.get("pool", "") for each in state.get("endpoints", {}).values()}
        why = next(iter(left_out.values()), "")
        whole = bool(left_out) and every == left_out.keys()
        self._check("servers", silent or (why if whole else ""), lambda: server_findings(state))
        if left_out and not whole:
            self.skipped[f"servers of pools {', '.join([*left_out][:NAMED_MAX])}{' …' if len(left_out) > NAMED_MAX else ''}"] = why

    def _counted(self, ports: Collection[int]) -> list[Finding]:
        """Returns the findings from Envoy's counters, if Envoy's admin port is known."""
        if not self._gateway.admin:
            return []
        try:
            return [
                found
                for cluster in picker_clusters(self._config, ports)
                for found in envoy_admin.stats_findings(envoy_admin.stats(self._gateway.admin, cluster))
            ]
        except (OSError, ValueError) as failed:
            self.skipped["counters of the gateway"] = str(failed)
            return []

    def _tls_skipped(self, *, tls: bool) -> str:
        if self._picker.seen is None:
            return "the picker is on another machine"
        return "" if tls else "the picker has --secure-serving=false"

    def _tls(self) -> list[Finding]:
        from workers.cli.doctor.tls import tls_findings  # cryptography takes memory and time

        wanted = TlsNames((), False) if self._config is None else tls_names(self._config)
        assert self._picker.seen is not None
        port = self._picker.seen.ports["grpc"]
        return tls_findings("127.0.0.1", port, TlsNames((*wanted.names, *self._tls_wanted), wanted.verified))

    def _access_skipped(self) -> str:
        from workers.cli.doctor.access import uses_kubernetes

        return "" if uses_kubernetes(self._picker) else "endpoints do not come from Kubernetes"

    def _access(self) -> list[Finding]:
        from workers.cli.doctor.access import access_findings

        try:
            return access_findings(self._picker)
        except ValueError as unknown:
            fix = "run `epp doctor` in the picker's pod, or set KUBECONFIG"
            return [Finding("kubernetes-api", ERROR, "No Kubernetes API is known here", str(unknown), fix)]


def _gateway(file: str, admin: str) -> Gateway:
    """Reads the gateway's configuration. If no flag names a gateway, looks for an Envoy on this machine. Raises UsageError if the
    configuration cannot be read.
    """
    if file and admin:
        raise click.UsageError("--gateway-config and --gateway-admin cannot be given together")
    if not file and not admin:
        found = envoy_admin.found()
        return Gateway() if found is None else Gateway(found[1], found[0], named=False)
    import yaml

    try:
        if admin:
            return Gateway(envoy_admin.dump(admin), admin)
        if file == "-" and sys.stdin is None:
            raise ValueError("standard input is closed")
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
        return Gateway(json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text))
    except (OSError, ValueError, yaml.YAMLError) as failed:
        named = f"--gateway-config {file}" if file else f"--gateway-admin {admin}"
        raise click.UsageError(f"{named}: {getattr(failed, 'strerror', None) or failed}") from failed


def _json(findings: Sequence[Finding], visit: Visit) -> str:
    document = {"version": 1, "findings": findings, "checked": list(visit.found), "skipped": visit.skipped}
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def _print(findings: Sequence[Finding], visit: Visit) -> None:
    for found in findings:
        echo(f"{found.severity:<{LABEL}} {found.title} [{found.rule}]")
        first, *further = found.evidence.split("\n")
        echo(f"{'':<{LABEL}} {first}")
        # indented, so that a line in a hostile name does not look like the fix
        echo_lines(f"{'':<{LABEL}}   {line}" for line in further)
        echo(f"{'':<{LABEL}} fix: {found.fix}")
        echo()
    errors = sum(found.severity == ERROR for found in findings)
    echo(f"{errors} errors, {len(findings) - errors} warnings; checked: {', '.join(visit.found) or 'nothing'}")
    for name, why in visit.skipped.items():
        echo(f"not checked: {name} ({why})")
