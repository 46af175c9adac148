"""TLS for the listening sockets: with the operator's certificate or a self-signed one, and optionally with client certificates.

    Settings ── read ──▶ Material (PEM: chain, key, CAs of clients) ── server_context ──▶ a context for new connections

Each file is read once, then checked and loaded from that reading. So certificate and key match even if the files are replaced meanwhile.
Every context is new. OpenSSL keeps one certificate per type of key in a context, so an old context could keep its old certificate beside
the new one.

Contexts take TLS 1.2 or newer, and offer one protocol by ALPN. A self-signed certificate only encrypts, because clients cannot verify it.
Envoy's ext_proc clusters expect that if no certificate is configured. With client CAs, a client must have a certificate from one of them
(or from an intermediate CA of theirs). Otherwise the handshake fails, and no byte of that client reaches the application.

This module does not read files again (`workers.process.certificates` does), and does not check for revoked certificates.
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
    """Raised if a certificate or an option cannot be used. The text names it and says what to do."""


class Settings(NamedTuple):
    """The TLS settings of a port. `ciphers`: an OpenSSL cipher list for TLS 1.2; None for OpenSSL's default."""

    directory: Path | None = None  # the folder of tls.crt and tls.key; None for a self-signed certificate
    client_ca: Path | None = None  # None if clients need no certificate
    protocol: str = "h2"
    min_version: str = "1.2"
    ciphers: str | None = None
    directory_flag: str = "--cert-path"  # the flag that error texts name
    client_ca_flag: str = "--client-ca-file"

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that `read` reads."""
        pair = () if self.directory is None else (self.directory / "tls.crt", self.directory / "tls.key")
        return pair if self.client_ca is None else (*pair, self.client_ca)


class Material(NamedTuple):
    """The contents of the files, in PEM. `client_ca`: empty if clients need no certificate."""

    chain: bytes
    key: bytes
    client_ca: bytes = b""

    def validity(self) -> tuple[float, float]:
        """Returns when the server's certificate becomes valid and when it expires, in seconds since the epoch. Raises ValueError.

        Ignores the rest of the chain, because an expired root at its end is common and harmless.
        """
        certificate = x509.load_pem_x509_certificate(self.chain)
        return certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()


def read(settings: Settings) -> Material:
    """Reads the files. Without a directory, creates a new self-signed pair. Raises TlsError."""
    client_ca = b""
    if settings.client_ca is not None:
        client_ca = _content(settings.client_ca, settings.client_ca_flag, "it needs the PEM certificates of clients' CAs")
    if settings.directory is None:
        return Material(*self_signed(), client_ca)
    needs = "the certificate directory needs tls.crt and tls.key, both readable"
    chain, key, *_ = (_content(path, settings.directory_flag, needs) for path in settings.files)
    return Material(chain, key, client_ca)


def server_context(settings: Settings | None = None, material: Material | None = None) -> ssl.SSLContext:
    """Creates a context for new connections. Without `material`, reads the files. Raises TlsError."""
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
            "need a PEM certificate chain and its unencrypted PEM key"
        ) from None


def _require_clients_of(context: ssl.SSLContext, settings: Settings, client_ca: bytes) -> None:
    """Accepts only clients with a certificate of these CAs. Each CA may end the chain, even if it is not self-signed."""
    try:
        with _memory_file(client_ca) as path:
            context.load_verify_locations(path)
    except ssl.SSLError as error:
        reason = error.reason or "not PEM"
        raise TlsError(f"{settings.client_ca_flag}: {settings.client_ca}: not usable ({reason}); need PEM certificates, of CAs") from None
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
    """Yields a path for the ssl module, which takes certificates only from files.

    The file is in memory, so the key never reaches a disk.
    """
    descriptor = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _no_password() -> str:
    """Returns an empty password for an encrypted key, so that OpenSSL never asks for one on a terminal."""
    return ""


def self_signed() -> tuple[bytes, bytes]:
    """Creates a self-signed P-256 certificate. Returns the certificate and its key, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "endpoint-picker")])
    now = datetime.datetime.now(datetime.UTC)  # certificates need wall-clock time
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
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
