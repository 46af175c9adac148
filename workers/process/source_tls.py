"""Creates TLS contexts for metrics pages over https. The parent calls this before the fork, so that a bad certificate refuses the start."""

import ssl

from epp.plugins.extractors.metrics_source import MetricsDataSource


def source_tls(source: MetricsDataSource) -> ssl.SSLContext | None:
    """Returns the TLS context of a data source; None for http. Raises ValueError, which says what is wrong with the certificates."""
    if source.scheme == "http":
        return None
    authorities = "" if source.insecure_skip_verify else source.ca_cert_path
    paths = (
        ("caCertPath", authorities),
        ("clientCertPath", source.client_cert_path),
        ("clientKeyPath", source.client_key_path),
    )
    files = ", ".join(f"{name} {path}" for name, path in paths if path)
    try:
        return tls_context(
            None if source.insecure_skip_verify else authorities, source.client_cert_path, source.client_key_path
        )
    except OSError as refused:  # includes ssl.SSLError
        why = getattr(refused, "reason", None) or refused.strerror or "not PEM, or the key has a password"
        fix = "give PEM certificates, and for a client certificate its unencrypted PEM key"
        raise ValueError(f"plugin '{source.name}': {files}: not usable ({why}); {fix}") from refused


def tls_context(verify_with: str | None, certificate: str = "", key: str = "") -> ssl.SSLContext:
    """Returns a TLS context for clients. `verify_with`: a CA file; "" for the system's CAs; None to verify nothing. Raises OSError."""
    context = ssl.create_default_context(cafile=verify_with or None)
    if verify_with is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if certificate:
        context.load_cert_chain(certificate, key, password=lambda: "")  # OpenSSL must not ask for a password
    return context
