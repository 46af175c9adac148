"""Checks the certificate that the picker's ext_proc port shows against the names that the gateway expects."""

import socket
import ssl
from collections.abc import Sequence
from typing import Final, NamedTuple

from cryptography import x509

from workers.cli.doctor.gateway import TlsNames
from workers.shared.doctor_report import ERROR, Finding

TIMEOUT_S: Final = 3.0


class Shown(NamedTuple):
    """The names in a certificate, and whether the certificate is self-signed."""

    names: Sequence[str]
    self_signed: bool


def tls_findings(host: str, port: int, wanted: TlsNames) -> list[Finding]:
    """Connects to the ext_proc port and compares its certificate. `wanted`: the names that gateways expect."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host, port), TIMEOUT_S) as plain, context.wrap_socket(plain, server_hostname=host) as secured:
            certificate = secured.getpeercert(binary_form=True)
    except (OSError, ssl.SSLError) as failed:
        fix = "look at the picker's log; with --secure-serving=false the port has no TLS"
        return [Finding("tls-handshake", ERROR, "No TLS handshake with the ext_proc port", f"{host}:{port}: {failed}", fix)]
    assert certificate is not None
    return names_findings(shown_names(certificate), wanted)


def shown_names(certificate: bytes) -> Shown:
    """Returns the names of a certificate in DER."""
    parsed = x509.load_der_x509_certificate(certificate)
    try:
        names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return Shown((), parsed.issuer == parsed.subject)
    listed = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    return Shown(listed, parsed.issuer == parsed.subject)


def names_findings(shown: Shown, wanted: TlsNames) -> list[Finding]:
    """Returns the findings about the names of a certificate and the names that gateways expect."""
    found = []
    missing = [name for name in wanted.names if not any(_covers(each, name) for each in shown.names)]
    if missing:
        found.append(
            Finding(
                "tls-names",
                ERROR,
                "The picker's certificate lacks a name that the gateway expects",
                f"expected: {', '.join(missing)}; in the certificate: {', '.join(shown.names) or 'none'}",
                f"issue a certificate with the name (cert-manager: dnsNames: [{missing[0]}]) and give its folder with --cert-path",
            )
        )
    if wanted.verified and shown.self_signed:
        found.append(
            Finding(
                "tls-issuer",
                ERROR,
                "The gateway verifies the picker's certificate, which is self-signed",
                "the cluster has a trusted_ca, and the picker has no --cert-path",
                "give --cert-path a certificate of this CA, or remove validation_context from the gateway's cluster",
            )
        )
    return found


def _covers(pattern: str, name: str) -> bool:
    """Returns whether a name of a certificate covers a DNS name: a wildcard stands for one label (RFC 6125, 6.4.3)."""
    pattern, name = pattern.lower(), name.lower()
    if pattern.startswith("*."):
        return name.partition(".")[2] == pattern[2:]
    return pattern == name
