"""Reads secrets and certificates. The parent does this before the first fork, so a wrong file makes the start fail."""

import hashlib
import os
import ssl
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from epp.plugins.extractors.metrics_source import MetricsDataSource
from workers.process import Unusable
from workers.process.prefix_secret import SECRET_BYTES, kept_secret

if TYPE_CHECKING:
    from workers.host.options import Options
    from workers.process.certificates import Certificates


def source_tls(source: MetricsDataSource) -> ssl.SSLContext | None:
    """Returns the TLS context of a data source, or None for http. Raises ValueError; its text names the fault of the certificates."""
    if source.scheme == "http":
        return None
    authorities = "" if source.insecure_skip_verify else source.ca_cert_path
    paths = (("caCertPath", authorities), ("clientCertPath", source.client_cert_path), ("clientKeyPath", source.client_key_path))
    files = ", ".join(f"{name} {path}" for name, path in paths if path)
    try:
        return tls_context(None if source.insecure_skip_verify else authorities, source.client_cert_path, source.client_key_path)
    except OSError as refused:  # includes ssl.SSLError
        why = getattr(refused, "reason", None) or refused.strerror or "not PEM, or the key has a password"
        fix = "give PEM certificates, and for a client certificate its unencrypted PEM key"
        raise ValueError(f"plugin '{source.name}': {files}: not usable ({why}); {fix}") from refused


def tls_context(verify_with: str | None, certificate: str = "", key: str = "") -> ssl.SSLContext:
    """Returns a TLS context for clients. `verify_with`: a CA file; "" means the system's CAs; None means no verification. Raises
    OSError.
    """
    context = ssl.create_default_context(cafile=verify_with or None)
    if verify_with is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if certificate:
        context.load_cert_chain(certificate, key, password=lambda: "")  # OpenSSL must not ask for a password
    return context


class Credentials(NamedTuple):
    """The picker's secrets, and the certificates that it shows to peers. The certificates of a port without TLS are None."""

    prefix_seed: int
    scrape_tls: Mapping[str, ssl.SSLContext | None]  # by the name of the data source; None means that the source is scraped without TLS
    ext_proc: "Certificates | None"
    metrics: "Certificates | None"

    @classmethod
    def read(cls, options: "Options", sources: Sequence[MetricsDataSource], configuration: str) -> "Credentials":
        """Reads all files. `sources`: the data sources. `configuration`: the name of the file that configures them. Raises StartError."""
        return cls(prefix_seed(options), {}, *certificates(options)).reading(sources, configuration)

    def reading(self, sources: Sequence[MetricsDataSource], configuration: str) -> "Credentials":
        """Returns these credentials, but with the TLS contexts of `sources` only, read from their files. Raises Unusable."""
        try:
            return self._replace(scrape_tls={source.name: source_tls(source) for source in sources})
        except ValueError as wrong:
            raise Unusable(f"{configuration}: {wrong}") from wrong

    @property
    def ext_proc_context(self) -> ssl.SSLContext | None:
        """Returns the TLS context of the ext_proc port, or None without TLS."""
        return self.ext_proc.context if self.ext_proc else None


def tls_in_words(options: "Options") -> str:
    """Describes the TLS of the ext_proc port: off, with a self-signed certificate, or with the operator's."""
    if not options.secure_serving:
        return "off: the gateway must speak plaintext"
    return f"on, certificate of {options.cert_path}" if options.cert_path else "on, self-signed certificate"


def prefix_seed(options: "Options") -> int:
    """Returns the 64-bit seed of prefix hashes: from --prefix-secret-file, else from the replica store, else from the secret in
    --state-dir, else random.

    Raises StartError.
    """
    given = _given_secret(options.prefix_secret_file) if options.prefix_secret_file else b""
    if not options.replica_store:
        return _seed(given or _own_secret(options.state_dir))
    from workers.process.first_contact import agreed_secret  # a late import: only replicas with a shared store need this module
    from workers.replicas.address import secret_of

    seed = _seed(given or _own_secret(options.state_dir))
    # The call also checks the store, so it is made even if this replica offers no secret.
    agreed = agreed_secret(options.store, b"" if given else secret_of(seed))
    return int(agreed, 16) if agreed else seed


def _own_secret(state_dir: str) -> bytes:
    return kept_secret(state_dir) if state_dir else os.urandom(SECRET_BYTES).hex().encode()


def _given_secret(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            secret = file.read().strip()
    except OSError as refused:
        raise Unusable(f"--prefix-secret-file {path} cannot be read: {refused.strerror}") from refused
    if len(secret) < 16:
        raise Unusable(f"--prefix-secret-file {path} has {len(secret)} bytes: give a secret of at least 16")
    return secret


def _seed(secret: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(secret, digest_size=8).digest(), "little")


def certificates(options: "Options") -> tuple["Certificates | None", "Certificates | None"]:
    """Returns the certificates of the ext_proc port and of the metrics port, each None without TLS. Raises Unusable."""
    if not (options.secure_serving or options.metrics_cert_dir):
        return None, None
    from workers.process.certificates import of_ext_proc, of_metrics  # takes much memory, and only TLS needs it
    from workers.transport.tls import TlsError

    try:
        return of_ext_proc(options), of_metrics(options.metrics_cert_dir, options.metrics_client_ca_file)
    except TlsError as refused:
        raise Unusable(str(refused)) from refused
