"""Scrapes over HTTPS, with and without verification of the server."""

import asyncio
import datetime
import ipaddress
import re
import ssl
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from epp.plugins.extractors.metrics_source import MetricsDataSource
from tests.waiting import until
from tests.workers.supervisor.endpoints.model_servers import run, serving
from tests.workers.supervisor.endpoints.scraping import Seen, answer, reader
from workers.process.credentials import source_tls
from workers.shared.scrape_pace import Pacing
from workers.supervisor.endpoints.further_pages import scraper_of


def test_https_pages_are_scraped_with_and_without_verification(tmp_path: Any) -> None:
    certificate, key = _certificate(tmp_path)

    async def scenario() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server = await asyncio.start_server(serving(answer()), "127.0.0.1", 0, ssl=context)
        address = server.sockets[0].getsockname()[:2]
        loop = asyncio.get_running_loop()
        seen: dict[str, Seen] = {}
        scrapers = []
        for name, params in (
            ("any", {}),
            ("known", {"insecure_skip_verify": False, "ca_cert_path": str(certificate)}),
            ("unknown", {"insecure_skip_verify": False}),
        ):
            params = MetricsDataSource.Params(scheme="https", **params)  # type: ignore[arg-type]
            source = MetricsDataSource("s", params)
            seen[name] = Seen()
            scraper = scraper_of(source, loop, pacing=Pacing(0.05), tls=source_tls(source), inflight=lambda slot: 0, sink=seen[name])
            scraper.start()
            scraper.add("a", 0, address, reader())
            scrapers.append(scraper)
        await until(lambda: bool(seen["any"].good and seen["known"].good and seen["unknown"].bad), "pages")
        assert not seen["any"].bad
        assert not seen["known"].bad
        assert {entry[1] for entry in seen["unknown"].bad} == {"unreachable"}
        for scraper in scrapers:
            scraper.close()
        server.close()
        # Closed connections of TLS end when their peers have said so.
        await asyncio.sleep(0.05)

    run(scenario())


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"insecure_skip_verify": False, "ca_cert_path": "/nowhere/ca.pem"}, "caCertPath /nowhere/ca.pem: not usable (No such file"),
        ({"client_cert_path": "/nowhere/c", "client_key_path": "/nowhere/k"}, "clientCertPath /nowhere/c, clientKeyPath /nowhere/k: "),
        ({"insecure_skip_verify": False, "ca_cert_path": __file__}, f"caCertPath {__file__}: not usable (NO_CERTIFICATE"),
    ],
)
def test_unusable_certificates_for_https_pages_are_refused_with_their_paths(params: dict[str, Any], named: str) -> None:
    source = MetricsDataSource("metrics", MetricsDataSource.Params(scheme="https", **params))
    with pytest.raises(ValueError, match=re.escape(f"plugin 'metrics': {named}")):
        source_tls(source)


def _certificate(directory: Any) -> tuple[Any, Any]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pod")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    (directory / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (directory / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return directory / "cert.pem", directory / "key.pem"
