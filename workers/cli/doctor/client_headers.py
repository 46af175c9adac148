"""Says what clients can do with headers that the picker trusts, unless the gateway removes them."""

from collections.abc import Collection, Sequence
from typing import Any, Final

from epp.config.control_headers import FAIRNESS, FIX, exposed
from epp.request.client_headers import GATEWAY, GROUPS
from workers.cli.doctor.gateway import headers_from_outside
from workers.shared.doctor_report import WARNING, Finding

LET_THROUGH: Final = (
    "remove them in early_header_mutation_extensions of the HTTP connection manager, before any filter; deploy/envoy.yaml has all of it"
)


def client_header_findings(flag: str, config: Any, ports: Collection[int], *, tenants: bool = False) -> list[Finding]:
    """Returns the finding; none if no client can set a trusted header.

    `flag`: the value of the picker's --trust-client-headers. `config`: the gateway's configuration, which counts more than the flag's word
    about the gateway; None if it is not known. `ports`: the picker's ext_proc ports. `tenants`: whether the picker has tenants, so that no
    client names its fairness id.
    """
    words = flag.split(",")
    trusted = [group for group in GROUPS if group in words and not (tenants and group == FAIRNESS)]
    names = [name for group in trusted for name in GROUPS[group]]
    outside = headers_from_outside(config, ports, names) if config is not None else None
    if outside is None:
        return [] if GATEWAY in words else _finding(trusted, f"--trust-client-headers is {flag}", FIX)
    open_groups = [group for group in trusted if set(GROUPS[group]) & set(outside)]
    return _finding(open_groups, f"the gateway lets through: {', '.join(outside)}", LET_THROUGH)


def _finding(groups: Sequence[str], evidence: str, fix: str) -> list[Finding]:
    if not groups:
        return []
    title = "Clients can set headers that the picker trusts"
    lines = [evidence, *(f"a client can {power}" for power in exposed(groups))]
    return [Finding("client-headers", WARNING, title, "\n".join(lines), fix)]
