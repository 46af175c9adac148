"""Certificates: the self-signed one, the operator's, and what is said about bad ones."""

import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from workers.transport.tls import TlsError, load_pair, self_signed, server_context


def write_pair(directory, pair=None):
    certificate, key = pair or self_signed()
    (directory / "tls.crt").write_bytes(certificate)
    (directory / "tls.key").write_bytes(key)


def handshake(context):
    """A handshake in memory; returns the client's side."""
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.verify_mode = ssl.CERT_NONE
    client_context.set_alpn_protocols(["h2", "http/1.1"])
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(5):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return client


def test_without_a_directory_the_certificate_signs_itself():
    client = handshake(server_context(None))
    assert client.selected_alpn_protocol() == "h2"
    assert client.version() == "TLSv1.3"
    certificate = x509.load_der_x509_certificate(client.getpeercert(binary_form=True))
    assert isinstance(certificate.public_key().curve, ec.SECP256R1)
    assert certificate.issuer == certificate.subject


def test_the_operators_pair_is_used_and_can_be_loaded_again(tmp_path):
    write_pair(tmp_path)
    context = server_context(tmp_path, "1.3")
    first = handshake(context).getpeercert(binary_form=True)
    write_pair(tmp_path)
    load_pair(context, tmp_path)
    assert handshake(context).getpeercert(binary_form=True) != first


def test_a_bad_pair_leaves_the_old_one_in_place(tmp_path):
    write_pair(tmp_path)
    context = server_context(tmp_path)
    first = handshake(context).getpeercert(binary_form=True)
    write_pair(tmp_path, (self_signed()[0], self_signed()[1]))
    with pytest.raises(TlsError, match="not a usable pair"):
        load_pair(context, tmp_path)
    assert handshake(context).getpeercert(binary_form=True) == first


@pytest.mark.parametrize("missing", ["tls.crt", "tls.key"])
def test_a_missing_file_is_named(tmp_path, missing):
    write_pair(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(TlsError, match=f"{missing}: No such file"):
        server_context(tmp_path)


def test_what_is_no_certificate_is_refused(tmp_path):
    write_pair(tmp_path, (b"hello", b"world"))
    with pytest.raises(TlsError, match="not a usable pair"):
        server_context(tmp_path)


def test_an_encrypted_key_is_refused_and_never_asked_about(tmp_path):
    certificate, key = self_signed()
    private = serialization.load_pem_private_key(key, None)
    encrypted = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    write_pair(tmp_path, (certificate, encrypted))
    with pytest.raises(TlsError, match="unencrypted"):
        server_context(tmp_path)


def test_versions_and_ciphers_are_checked():
    assert server_context(None, "1.3").minimum_version is ssl.TLSVersion.TLSv1_3
    assert server_context(None).minimum_version is ssl.TLSVersion.TLSv1_2
    names = {c["name"] for c in server_context(None, ciphers="ECDHE-ECDSA-AES128-GCM-SHA256").get_ciphers()}
    assert "ECDHE-ECDSA-AES256-GCM-SHA384" not in names
    with pytest.raises(TlsError, match=r"'1\.1' is not known: use one of 1\.2, 1\.3"):
        server_context(None, "1.1")
    with pytest.raises(TlsError, match="NONSENSE"):
        server_context(None, ciphers="NONSENSE")
