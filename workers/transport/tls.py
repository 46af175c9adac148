"""TLS for the listening sockets: the operator's certificate, or one that signs itself.

Made once in the parent before it forks; children inherit the context. Speaks `h2` by ALPN, TLS 1.2 or newer. A self-signed
certificate serves encryption alone: whoever connects can't verify it, which is what Envoy's ext_proc clusters expect when no
certificate was configured.
"""

import datetime
import ssl
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_DAYS = 3650


class TlsError(ValueError):
    """The certificate or an option can't be used; says which and what to do."""


VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


def server_context(directory: Path | None, min_version: str = "1.2", ciphers: str | None = None) -> ssl.SSLContext:
    """A context for `tls.crt` and `tls.key` in `directory`; without a directory, for a self-signed certificate.
    `ciphers` is an OpenSSL list and concerns TLS 1.2 only."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if min_version not in VERSIONS:
        raise TlsError(f"TLS version {min_version!r} is not known: use one of {', '.join(VERSIONS)}")
    context.minimum_version = VERSIONS[min_version]
    context.set_alpn_protocols(["h2"])
    if ciphers is not None:
        try:
            context.set_ciphers(ciphers)
        except ssl.SSLError:
            raise TlsError(f"TLS ciphers {ciphers!r}: OpenSSL knows none of them") from None
    if directory is None:
        _load_self_signed(context)
    else:
        load_pair(context, directory)
    return context


def load_pair(context: ssl.SSLContext, directory: Path) -> None:
    """Load, or load again, the pair in a directory. New connections use it; a bad one changes nothing."""
    certificate, key = directory / "tls.crt", directory / "tls.key"
    for path in (certificate, key):
        try:
            path.open("rb").close()
        except OSError as error:
            raise TlsError(
                f"{path}: {error.strerror}; the certificate directory needs tls.crt and tls.key, both readable"
            ) from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_no_password)
        context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or "not PEM, or the key has a password"
        raise TlsError(
            f"{certificate} and {key}: not a usable pair ({reason}); "
            "need a PEM certificate chain and its own unencrypted PEM key"
        ) from None


def _no_password() -> str:
    """Answers for an encrypted key: never ask on a terminal."""
    return ""


def _load_self_signed(context: ssl.SSLContext) -> None:
    certificate, key = self_signed()
    with tempfile.TemporaryDirectory() as name:  # the ssl module takes certificates from files only
        directory = Path(name)
        (directory / "tls.crt").write_bytes(certificate)
        (directory / "tls.key").touch(mode=0o600)
        (directory / "tls.key").write_bytes(key)
        load_pair(context, directory)


def self_signed() -> tuple[bytes, bytes]:
    """A P-256 certificate and its key, PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "endpoint-picker")])
    now = datetime.datetime.now(datetime.UTC)  # certificates are the one thing here that lives in wall time
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return (
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )
