"""TLS for the listening sockets: the operator's certificate, or one that signs itself; and whose clients are let in.

    Settings ── read ──▶ Material (PEM: chain, key, CA of clients) ── server_context ──▶ a context for new connections

Files are read once, checked, and loaded from that reading, so a pair that is replaced meanwhile is never mixed up. Every
context is new: one that was loaded again would keep the old certificate beside the new for as long as their kinds of key differ.

TLS 1.2 or newer, one protocol by ALPN. A self-signed certificate serves encryption alone: whoever connects can't verify it,
which is what Envoy's ext_proc clusters expect when no certificate was configured. With a CA of clients, a client that
shows no certificate of that CA (or of one it has certified) fails in the handshake: no byte of it reaches the application.

What this does not do: look at files again (`workers.certificates` does), or ask whether a certificate was revoked.
"""

import contextlib
import datetime
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_DAYS = 3650
FILE_BYTES_MAX = 1 << 20
VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


class TlsError(ValueError):
    """The certificate or an option can't be used; says which and what to do."""


class Settings(NamedTuple):
    """What a port's TLS is made of. `ciphers` is an OpenSSL list and concerns TLS 1.2 only."""

    directory: Path | None = None  # of tls.crt and tls.key; None: self-signed
    client_ca: Path | None = None  # None: clients need no certificate
    protocol: str = "h2"
    min_version: str = "1.2"
    ciphers: str | None = None
    directory_flag: str = "--cert-path"  # how errors call it
    client_ca_flag: str = "--client-ca-file"

    @property
    def files(self) -> tuple[Path, ...]:
        """All that is read."""
        pair = () if self.directory is None else (self.directory / "tls.crt", self.directory / "tls.key")
        return pair if self.client_ca is None else (*pair, self.client_ca)


class Material(NamedTuple):
    """What the files say, as PEM; `client_ca` is empty where clients need no certificate."""

    chain: bytes
    key: bytes
    client_ca: bytes = b""

    def validity(self) -> tuple[float, float]:
        """Wall time from and until which the server's own certificate is valid. An expired root at the end of a chain is
        common and harmless, so the others don't count. Raises ValueError."""
        own = x509.load_pem_x509_certificate(self.chain)
        return own.not_valid_before_utc.timestamp(), own.not_valid_after_utc.timestamp()


def read(settings: Settings) -> Material:
    """What the files hold now; without a directory, a new self-signed pair. Raises TlsError."""
    client_ca = b""
    if settings.client_ca is not None:
        client_ca = _content(
            settings.client_ca, settings.client_ca_flag, "it needs the PEM certificates of clients' CAs"
        )
    if settings.directory is None:
        return Material(*self_signed(), client_ca)
    needs = "the certificate directory needs tls.crt and tls.key, both readable"
    chain, key, *_ = (_content(path, settings.directory_flag, needs) for path in settings.files)
    return Material(chain, key, client_ca)


def server_context(settings: Settings | None = None, material: Material | None = None) -> ssl.SSLContext:
    """A context for new connections; without material, of what `read` finds. Raises TlsError."""
    settings = settings or Settings()
    material = material or read(settings)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if settings.min_version not in VERSIONS:
        raise TlsError(f"TLS version {settings.min_version!r} is not known: use one of {', '.join(VERSIONS)}")
    context.minimum_version = VERSIONS[settings.min_version]
    context.set_alpn_protocols([settings.protocol])
    if settings.ciphers is not None:
        try:
            context.set_ciphers(settings.ciphers)
        except ssl.SSLError:
            raise TlsError(f"TLS ciphers {settings.ciphers!r}: OpenSSL knows none of them") from None
    _load_pair(context, settings, material)
    if material.client_ca:
        _require_clients_of(context, settings, material.client_ca)
    return context


def _load_pair(context: ssl.SSLContext, settings: Settings, material: Material) -> None:
    try:
        with _memory_file(material.chain) as chain, _memory_file(material.key) as key:
            context.load_cert_chain(chain, key, password=_no_password)
        material.validity()
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or "not PEM, or the key has a password"
        raise TlsError(
            f"{settings.directory_flag}: {' and '.join(str(path) for path in settings.files[:2])}: not a usable pair ({reason}); "
            "need a PEM certificate chain and its own unencrypted PEM key"
        ) from None


def _require_clients_of(context: ssl.SSLContext, settings: Settings, client_ca: bytes) -> None:
    """Whoever is certified by one of these; each of them is an end of the chain, self-signed or not."""
    try:
        with _memory_file(client_ca) as path:
            context.load_verify_locations(path)
    except ssl.SSLError as error:
        reason = error.reason or "not PEM"
        raise TlsError(
            f"{settings.client_ca_flag}: {settings.client_ca}: not usable ({reason}); need PEM certificates, of CAs"
        ) from None
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    context.verify_mode = ssl.CERT_REQUIRED


def _content(path: Path, flag: str, needs: str) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise TlsError(f"{flag}: {path}: {error.strerror}; {needs}") from None
    if not content.strip() or len(content) > FILE_BYTES_MAX:
        size = "empty" if len(content) <= FILE_BYTES_MAX else f"longer than {FILE_BYTES_MAX} bytes"
        raise TlsError(f"{flag}: {path} is {size}; {needs}")
    return content


@contextlib.contextmanager
def _memory_file(content: bytes) -> Iterator[str]:
    """A path for the ssl module, which takes certificates from files only; a key doesn't touch a disk this way."""
    descriptor = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _no_password() -> str:
    """Answers for an encrypted key: never ask on a terminal."""
    return ""


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
