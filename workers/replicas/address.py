"""Reads the URL of the replica store, for the parent. No function of this module shows a password.

redis://[user[:password]@]host[:port][/database]     Redis or Valkey; the port is 6379 by default
rediss://...                                         the same over TLS
unix://[user[:password]@]/path/of/socket[?db=N]
redis+sentinel://[user[:password]@]host[:port],.../service[/database]

?cluster=true                a Redis Cluster: the host is one of its nodes (redis:// and rediss://)
?ca=FILE&cert=FILE&key=FILE  TLS: CAs of the server, certificate and key of the picker (rediss://, or with tls=true for Sentinel)
?sentinel_user=NAME&sentinel_password_file=FILE     for the Sentinels; user and password before the @ are for the store
"""

import re
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel")
PORT, SENTINEL_PORT = 6379, 26379
HOSTS_MAX = 16
OPTIONS = {
    "redis": ("cluster",),
    "rediss": ("cluster", "ca", "cert", "key"),
    "unix": ("db",),
    "redis+sentinel": ("tls", "ca", "cert", "key", "sentinel_user", "sentinel_password_file"),
}
_KNOWN = frozenset(option for options in OPTIONS.values() for option in options)
_TRUE = {"true": True, "false": False}
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\],]+)(?::([0-9]{1,5}))?")


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """The address of the store. `str` shows the address without user and password."""

    scheme: str
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    user: str = ""
    password: str = ""
    database: int = 0
    service: str = ""  # of Sentinel
    sentinel_user: str = ""
    sentinel_password_file: str = ""
    cluster: bool = False
    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"{self.scheme}://{self.path}"
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"{self.scheme}://{hosts}" + (f"/{self.service}" if self.service else "")

    def __repr__(self) -> str:
        return f"Address({self})"


class ContactAnswer(msgspec.Struct, array_like=True, frozen=True):
    """The result of the first contact. `why`: the reason why the store cannot be used, or "". `secret`: the common secret, if it was asked
    for.
    """

    why: str = ""
    text: str = ""
    permanent: bool = False  # another start does not help
    secret: bytes = b""


def secret_of(seed: int) -> bytes:
    """Returns the form in which the store keeps a 64-bit seed of block hashes: 16 hexadecimal digits."""
    return f"{seed:016x}".encode()


def parse_address(url: str) -> Address:
    """Reads a URL. Raises ValueError; its text names the rule and shows neither user nor password."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in SCHEMES:
        raise ValueError(f"the URL must begin with one of {', '.join(f'{name}://' for name in SCHEMES)}")
    try:
        parts = urlsplit(f"//{rest}")
    except ValueError:
        raise ValueError("the host is malformed; write an IPv6 address in brackets") from None
    if "@" in parts.path + parts.query + parts.fragment:
        raise ValueError("the URL has an '@' behind the host; in a password write ? as %3F, / as %2F, # as %23; elsewhere @ as %40")
    if parts.fragment:
        raise ValueError("the URL has a '#'; write it as %23 in a password")
    credentials, _, places = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    fields: dict[str, object] = {
        "scheme": scheme,
        "user": unquote(user),
        "password": unquote(password),
        "tls": scheme == "rediss",
        **_options(scheme, parts.query),
    }
    path = unquote(parts.path)
    if scheme == "unix":
        if places or not path.strip("/"):
            raise ValueError("unix:// needs the path of a socket: unix:///run/valkey.sock")
        return msgspec.convert(fields | {"path": path}, Address)
    fields["hosts"] = _hosts(places, SENTINEL_PORT if scheme == "redis+sentinel" else PORT)
    if scheme == "redis+sentinel":
        fields["service"], _, path = path.strip("/").partition("/")
        if not fields["service"]:
            raise ValueError("redis+sentinel:// needs the name of the service: redis+sentinel://host:26379/mymaster")
    elif len(_hosts(places, PORT)) != 1:
        raise ValueError(f"{scheme}:// takes one host")
    fields["database"] = _database(path.strip("/"))
    if fields.get("cluster") and fields["database"]:
        raise ValueError("a cluster has only database 0")
    return msgspec.convert(fields, Address)


def _options(scheme: str, query: str) -> dict[str, object]:
    fields: dict[str, object] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in OPTIONS[scheme]:
            option = f"option '{name}'" if name in _KNOWN else "an option"  # another text could be part of a password
            raise ValueError(f"{option} is not known for {scheme}://; it has {', '.join(OPTIONS[scheme])}")
        if name in ("cluster", "tls"):
            if value not in _TRUE:
                raise ValueError(f"write {name}=true or {name}=false")
            fields[name] = _TRUE[value]
        elif name == "db":
            fields["database"] = _database(value)
        else:
            fields[name] = value
    if fields.get("key") and not fields.get("cert"):
        raise ValueError("key needs cert, the certificate of the same key")
    return fields


def _hosts(text: str, port: int) -> tuple[tuple[str, int], ...]:
    hosts = []
    for part in text.split(","):
        match = _HOST.fullmatch(part)
        if match is None or not 0 < int(match[2] or port) < 1 << 16:
            raise ValueError("the host is missing or malformed; write host or host:port, and IPv6 in brackets")
        hosts.append((match[1].strip("[]"), int(match[2] or port)))
    if len(hosts) > HOSTS_MAX:
        raise ValueError(f"more than {HOSTS_MAX} hosts")
    return tuple(hosts)


def _database(text: str) -> int:
    if text and (not text.isascii() or not text.isdecimal() or len(text) > 4):
        raise ValueError("the database is a number, such as redis://host:6379/0")
    return int(text or 0)
