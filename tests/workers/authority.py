"""A certificate authority for tests, and folders with pairs, written like those of an operator or of Kubernetes."""

import datetime
import os
import ssl
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


class Pair(NamedTuple):
    """PEM."""

    chain: bytes
    key: bytes

    @property
    def der(self) -> bytes:
        return x509.load_pem_x509_certificate(self.chain).public_bytes(serialization.Encoding.DER)


class Authority:
    """Issues certificates for `localhost`. `above`: the authority that signs this one's certificate."""

    def __init__(self, name: str = "test CA", above: "Authority | None" = None) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        signer = above or self
        builder = _builder(self._name, signer._name, self._key, -1.0, 365.0)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.pem = builder.sign(signer._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def pair(self, *, days: float = 30.0, since: float = -1.0, use: x509.ObjectIdentifier = SERVER, rsa_key: bool = False) -> Pair:
        """A new pair, valid from `since` to `days`, both in days from now."""
        key: Key = rsa.generate_private_key(65537, 2048) if rsa_key else ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
        builder = _builder(name, self._name, key, since, days)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return Pair(certificate.public_bytes(serialization.Encoding.PEM), _pem(key))

    def client(self, shown: Pair | None = None, directory: Path | None = None) -> ssl.SSLContext:
        """A client's context that trusts this authority and shows the pair `shown`, which is written to `directory`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=self.pem.decode())
        context.set_alpn_protocols(["h2", "http/1.1"])
        if shown is not None and directory is not None:
            written = write_pair(directory, shown)
            context.load_cert_chain(written / "tls.crt", written / "tls.key")
        return context


def _builder(name: x509.Name, issuer: x509.Name, key: Key, since: float, days: float) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=name,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now + datetime.timedelta(days=min(since, days - 1.0)),
        not_valid_after=now + datetime.timedelta(days=days),
    )


def _pem(key: Key) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def write(path: Path, content: bytes) -> None:
    """Write a file in one step, by replacing it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_bytes(content)
    os.replace(new, path)


def write_pair(directory: Path, pair: Pair) -> Path:
    """Write both files, one after the other."""
    write(directory / "tls.crt", pair.chain)
    write(directory / "tls.key", pair.key)
    return directory


class Volume:
    """A folder like that of a Secret mounted by the kubelet: its files are links through `..data`, a link that is swapped."""

    def __init__(self, directory: Path, pair: Pair) -> None:
        self.directory = directory
        self._versions = 0
        directory.mkdir()
        self.swap(pair)
        for name in ("tls.crt", "tls.key"):
            (directory / name).symlink_to(f"..data/{name}")

    def swap(self, pair: Pair) -> None:
        """Replace the current version by another one, and remove the old one."""
        data, new = self.directory / "..data", self.directory / "..data_tmp"
        before = data.resolve() if data.exists() else None
        self._versions += 1
        version = write_pair(self.directory / f"..version-{self._versions}", pair)
        new.symlink_to(version.name)
        os.replace(new, data)
        if before is not None:
            for file in before.iterdir():
                file.unlink()
            before.rmdir()
