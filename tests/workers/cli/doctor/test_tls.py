"""The findings about the certificate of the ext_proc port."""

import ssl

import pytest

from loadtest.demo.ports import free_ports
from workers.cli.doctor.gateway import TlsNames
from workers.cli.doctor.tls import Shown, names_findings, shown_names, tls_findings
from workers.transport.tls import self_signed

ISSUED = Shown(("epp.default.svc", "*.pool.example"), self_signed=False)


@pytest.mark.parametrize("name", ["epp.default.svc", "EPP.default.svc", "a.pool.example"])
def test_a_name_in_the_certificate_is_no_finding(name: str) -> None:
    assert names_findings(ISSUED, TlsNames((name,), verified=True)) == []


@pytest.mark.parametrize("name", ["epp", "pool.example", "a.b.pool.example"])
def test_a_name_that_the_certificate_lacks_is_named(name: str) -> None:
    (found,) = names_findings(ISSUED, TlsNames((name,), verified=True))
    assert (found.rule, found.severity) == ("tls-names", "error")
    assert name in found.evidence
    assert "epp.default.svc" in found.evidence


def test_a_gateway_that_verifies_refuses_a_self_signed_certificate() -> None:
    shown = shown_names(ssl.PEM_cert_to_DER_cert(self_signed()[0].decode()))
    assert shown == Shown(["localhost"], self_signed=True)
    assert [found.rule for found in names_findings(shown, TlsNames((), verified=True))] == ["tls-issuer"]
    assert names_findings(shown, TlsNames((), verified=False)) == []


def test_a_port_without_tls_is_named() -> None:
    (port,) = free_ports(1)
    (found,) = tls_findings("127.0.0.1", port, TlsNames((), verified=False))
    assert found.rule == "tls-handshake"
    assert str(port) in found.evidence
