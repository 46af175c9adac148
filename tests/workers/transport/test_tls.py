"""TLS contexts: the self-signed certificate, the operator's certificate, client CAs, and errors for bad files."""

import ssl
import warnings
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.tls_client import client_context
from tests.workers.authority import CLIENT, Authority, Pair, write, write_pair
from workers.transport.tls import FILE_BYTES_MAX, Settings, TlsError, read, self_signed, server_context


def anyone() -> ssl.SSLContext:
    """A client that verifies nothing."""
    return client_context(("h2", "http/1.1"))


def handshake(context: ssl.SSLContext, client_context: ssl.SSLContext | None = None) -> ssl.SSLObject:
    """Does a handshake in memory. Returns the client's side. Raises the SSLError of the side that refuses."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = (client_context or anyone()).wrap_bio(to_client, to_server, server_hostname="localhost")
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(5):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return client


def test_without_a_directory_the_certificate_is_self_signed() -> None:
    client = handshake(server_context())
    assert client.selected_alpn_protocol() == "h2"
    assert client.version() == "TLSv1.3"
    certificate = x509.load_der_x509_certificate(client.getpeercert(binary_form=True) or b"")
    assert isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)
    assert certificate.issuer == certificate.subject


@pytest.mark.parametrize("rsa_key", [False, True])
def test_the_operators_pair_is_used(tmp_path: Path, rsa_key: bool) -> None:
    authority = Authority()
    pair = authority.pair(rsa_key=rsa_key)
    settings = Settings(write_pair(tmp_path, pair), protocol="http/1.1")
    client = handshake(server_context(settings), authority.client())
    assert client.getpeercert(binary_form=True) == pair.der
    assert client.selected_alpn_protocol() == "http/1.1"


def test_the_server_sends_the_whole_chain(tmp_path: Path) -> None:
    root = Authority("root")
    between = Authority("between", above=root)
    pair = between.pair()
    settings = Settings(write_pair(tmp_path, Pair(pair.chain + between.pem, pair.key)))
    assert handshake(server_context(settings), root.client()).getpeercert(binary_form=True) == pair.der


@pytest.mark.parametrize("missing", ["tls.crt", "tls.key"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    write_pair(tmp_path, Pair(*self_signed()))
    (tmp_path / missing).unlink()
    with pytest.raises(TlsError, match=f"--cert-path: .*{missing}: No such file"):
        server_context(Settings(tmp_path))


@pytest.mark.parametrize(
    ("certificate", "why"),
    [
        (b"hello", "not a usable pair"),
        (b"", "is empty"),
        (b"x" * (FILE_BYTES_MAX + 1), "is longer than"),
        (self_signed()[0], "not a usable pair .KEY_VALUES_MISMATCH"),
        (self_signed()[0][:200], "not a usable pair"),
    ],
)
def test_files_that_are_no_pair_are_refused(tmp_path: Path, certificate: bytes, why: str) -> None:
    write_pair(tmp_path, Pair(certificate, self_signed()[1]))
    with pytest.raises(TlsError, match=why):
        server_context(Settings(tmp_path))


def test_an_encrypted_key_is_refused_without_a_password_prompt(tmp_path: Path) -> None:
    certificate, key = self_signed()
    private = serialization.load_pem_private_key(key, None)
    encrypted = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    write_pair(tmp_path, Pair(certificate, encrypted))
    with pytest.raises(TlsError, match="unencrypted"):
        server_context(Settings(tmp_path))


def test_versions_and_ciphers_are_checked() -> None:
    assert server_context(Settings(min_version="1.3")).minimum_version is ssl.TLSVersion.TLSv1_3
    assert server_context().minimum_version is ssl.TLSVersion.TLSv1_2
    names = {c["name"] for c in server_context(Settings(ciphers="ECDHE-ECDSA-AES128-GCM-SHA256")).get_ciphers()}
    assert "ECDHE-ECDSA-AES256-GCM-SHA384" not in names
    with pytest.raises(TlsError, match=r"'1\.1' is not known: use one of 1\.2, 1\.3"):
        server_context(Settings(min_version="1.1"))
    with pytest.raises(TlsError, match="NONSENSE"):
        server_context(Settings(ciphers="NONSENSE"))


@pytest.mark.parametrize(("lowest", "spoken"), [("1.2", "TLSv1_1"), ("1.3", "TLSv1_2")])
def test_a_client_with_an_older_version_is_refused(lowest: str, spoken: str) -> None:
    old = anyone()
    old.set_ciphers("ALL:@SECLEVEL=0")  # otherwise the client would not even try
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        old.minimum_version = old.maximum_version = ssl.TLSVersion[spoken]
    context = server_context(Settings(min_version=lowest))
    with pytest.raises(ssl.SSLError, match="UNSUPPORTED_PROTOCOL"):
        handshake(context, old)


def test_the_validity_is_that_of_the_first_certificate_in_the_chain(tmp_path: Path) -> None:
    pair = Authority().pair(days=3.0)
    expired_root = Authority().pair(days=-3.0).chain
    found = read(Settings(write_pair(tmp_path, Pair(pair.chain + expired_root, pair.key)))).validity()
    own = x509.load_pem_x509_certificate(pair.chain)
    assert found == (own.not_valid_before_utc.timestamp(), own.not_valid_after_utc.timestamp())


def client_settings(tmp_path: Path, server: Pair, client_ca: bytes) -> Settings:
    write(tmp_path / "ca.pem", client_ca)
    return Settings(write_pair(tmp_path / "server", server), client_ca=tmp_path / "ca.pem")


def test_text_between_the_cas_may_be_in_any_language(tmp_path: Path) -> None:
    authority = Authority()
    settings = client_settings(tmp_path, authority.pair(), "# autorité\n".encode() + authority.pem)
    handshake(server_context(settings), authority.client(authority.pair(use=CLIENT), tmp_path / "client"))


@pytest.mark.parametrize("trusted", ["root", "between", "both"])
def test_clients_with_a_certificate_of_any_of_the_cas_are_accepted(tmp_path: Path, trusted: str) -> None:
    root = Authority("root")
    between = Authority("between", above=root)
    cas = {"root": root.pem, "between": between.pem, "both": Authority().pem + root.pem}[trusted]
    shown = between.pair(use=CLIENT)
    context = server_context(client_settings(tmp_path, root.pair(), cas))
    handshake(context, root.client(Pair(shown.chain + between.pem, shown.key), tmp_path / "client"))


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        ("nothing", "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        ("of another CA", "CERTIFICATE_VERIFY_FAILED"),
        ("self-signed", "CERTIFICATE_VERIFY_FAILED"),
        ("expired", "CERTIFICATE_VERIFY_FAILED"),
        ("of a server", "CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_all_other_clients_are_refused(tmp_path: Path, shown: str, why: str) -> None:
    authority = Authority()
    pairs = {
        "nothing": None,
        "of another CA": Authority().pair(use=CLIENT),
        "self-signed": Pair(*self_signed()),
        "expired": authority.pair(use=CLIENT, days=-1.0),
        "of a server": authority.pair(),
    }
    context = server_context(client_settings(tmp_path, authority.pair(), authority.pem))
    with pytest.raises(ssl.SSLError, match=why):
        handshake(context, authority.client(pairs[shown], tmp_path / "client"))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "--client-ca-file: .*ca.pem: No such file"),
        (b"", "is empty; it needs the PEM certificates"),
        (b"hello", "ca.pem: not usable"),
        (b"\xff\xfe", "ca.pem: not usable"),
        (self_signed()[1], "ca.pem: not usable"),
    ],
)
def test_a_file_that_has_no_ca_is_refused(tmp_path: Path, content: bytes | None, why: str) -> None:
    settings = client_settings(tmp_path, Authority().pair(), content or b"")
    if content is None:
        (tmp_path / "ca.pem").unlink()
    with pytest.raises(TlsError, match=why):
        server_context(settings)
