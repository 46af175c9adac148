"""Connects to the store: Redis or Valkey, over TCP, TLS or a socket, alone, behind Sentinel, or as a cluster.

A link has two connections to one server: one publishes and reads keys, the other one listens. In a cluster, all names have one hash tag,
so one node has all keys; a message that is published there reaches only the listeners of that node in some versions, and all replicas
listen there.

    <prefix>:1:all             channel of all messages (`wire`)
    <prefix>:1:to:<name>       channel of what only one replica needs
    <prefix>:1:secret          the seed of block hashes, if no file gives it
    <prefix>:1:epoch           counts the lives of replicas

Channels are the same in all databases of a store. So names have the number of the database behind the 1
(`<prefix>:1:db2:all`), unless it is 0.

Every failure is a StoreError. Its text never has a password.
"""

import asyncio
import contextlib
import os
import re
from typing import Any

from redis.asyncio import RedisCluster
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    InvalidResponse,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from workers.endpoints.replicas.address import Address
from workers.endpoints.replicas.replies import Replies
from workers.endpoints.replicas.wire import EPOCH_MAX
from workers.host.options import PASSWORD_VARIABLE

ANSWER_S = 1.0  # how long the store may take for one answer
SILENCE_S = 2.0  # a listener that hears not even its own messages for so long has lost its connection
PASSWORD_BYTES_MAX = 4096
VERSION = 1
SECRET = re.compile(rb"[0-9a-f]{16}")
NUMBER = re.compile(rb"[0-9]{1,19}")
CLIENT = re.compile(r"<redis\..*?> - ")  # how the client names itself in its own texts
REFUSED = (
    "username-password",
    "AuthenticationError",
)  # also within the client's own texts, such as that on several Sentinels
DENIED = "this user has no permissions"


_Sentinel: Any = Sentinel  # its constructor has no types


class StoreError(Exception):
    """Says why the store cannot be used. `why`: unreachable, slow, refused (user or password), denied (ACL), full, read-only, error."""

    def __init__(self, why: str, text: str) -> None:
        super().__init__(text)
        self.why = why

    @property
    def permanent(self) -> bool:
        """Whether another attempt cannot help before somebody changes a setting."""
        return self.why in ("refused", "denied", "file")


class Names:
    """The names of channels and keys in the store."""

    def __init__(self, prefix: str, *, cluster: bool, database: int = 0) -> None:
        beginning = f"{{{prefix}}}" if cluster and "{" not in prefix else prefix
        self._beginning = f"{beginning}:{VERSION}" + (f":db{database}" if database else "")
        self.all = f"{self._beginning}:all"
        self.secret = f"{self._beginning}:secret"
        self.epoch = f"{self._beginning}:epoch"

    def to(self, name: str) -> str:
        """The channel of one replica."""
        return f"{self._beginning}:to:{name}"


def password_of(address: Address, file: str) -> str:
    """Returns the password: of the file, else of the environment, else of the URL. Raises StoreError if the file cannot be read."""
    if not file:
        return os.environ.get(PASSWORD_VARIABLE) or address.password
    return _password_in(file, "--replica-store-password-file")


def _sentinel_password(address: Address) -> str:
    file = address.sentinel_password_file
    return _password_in(file, "sentinel_password_file of --replica-store") if file else ""


def _password_in(file: str, given_by: str) -> str:
    try:
        with open(file, "rb") as opened:
            return opened.read(PASSWORD_BYTES_MAX).decode(errors="replace").strip()
    except OSError as refused:
        raise StoreError("file", f"{given_by} {file} cannot be read: {refused.strerror}") from None


class Link:
    """One connection to publish on, and one that listens to the channels of a replica. `open` makes both."""

    def __init__(self, address: Address, names: Names) -> None:
        self._address = address
        self.names = names
        self._out: Any = None
        self._in: Any = None
        self._owed = 0  # answers that the store has not sent yet

    @classmethod
    async def open(cls, address: Address, names: Names, password: str, name: str) -> "Link":
        """Connects, and listens to all messages and to those for `name`. Raises StoreError."""
        link = cls(address, names)
        try:
            with _InWords(address, password):
                where = await _server(address, names, password)
                link._out = await _connected(address, where, password)
                link._in = await _connected(address, where, password)
                for channel in (names.all, names.to(name)):
                    await link._in.send_command("SUBSCRIBE", channel)
                    await _answer(link._in, ANSWER_S)
        except BaseException:
            await link.close()
            raise
        return link

    async def close(self) -> None:
        """Closes both connections without waiting for answers."""
        for connection in (self._out, self._in):
            if connection is not None:
                with contextlib.suppress(Exception):
                    await connection.disconnect(nowait=True)

    async def command(self, *words: str | int | bytes) -> Any:
        """Runs one command, and returns its answer. Raises StoreError."""
        await self.settle()
        with _InWords(self._address):
            await self._out.send_command(*words)
            return await _answer(self._out, ANSWER_S)

    async def publish(self, channel: str, data: bytes) -> None:
        """Publishes a message. Reads the answer only with the next call, so that nobody waits for it. Raises StoreError."""
        await self.settle()
        with _InWords(self._address):
            self._owed = 1
            await self._out.send_packed_command(self._out.pack_command("PUBLISH", channel, data))

    async def settle(self) -> None:
        """Reads the answer to the last `publish`. Raises StoreError."""
        if self._owed:
            with _InWords(self._address):
                await _answer(self._out, ANSWER_S)
                self._owed = 0

    async def heard(self) -> tuple[str, bytes]:
        """Waits for the next message: (channel, data). Raises StoreError, also if nothing comes for SILENCE_S."""
        while True:
            with _InWords(self._address):
                answer = await _answer(self._in, SILENCE_S)
            match answer:
                case [b"message", bytes(channel), bytes(data)]:
                    return channel.decode(errors="replace"), data
                case [b"subscribe", bytes(), int()]:  # a message came before this answer of `open`
                    await asyncio.sleep(0)
                case _:
                    raise StoreError("error", f"{self._address}: the store sent something that is not a message")

    async def epoch(self, least: int) -> int:
        """Returns the number of a new life of a replica: above every earlier one, and at least `least`. Raises StoreError."""
        epoch = await self._counted(1)
        if epoch < least:  # the store has lost what it knew
            epoch = await self._counted(least - epoch)
        return max(epoch, least)

    async def remind(self, least: int) -> None:
        """Makes sure that later numbers will be above `least`, if the store has lost what it knew. Raises StoreError."""
        held = await self.command("GET", self.names.epoch)
        known = int(held) if isinstance(held, bytes) and NUMBER.fullmatch(held) else 0
        if known < least:
            await self._counted(least - known)

    async def _counted(self, up: int) -> int:
        """Counts the epoch up. Raises StoreError; its text names the key if that is why."""
        wrong = f"{self._address}: {self.names.epoch} in the store is not a number of this picker: delete the key"
        try:
            number = await self.command("INCRBY", self.names.epoch, up)
        except StoreError as refused:
            raise (StoreError("error", f"{wrong} ({refused})") if refused.why == "error" else refused) from None
        if not isinstance(number, int) or not 0 <= number <= EPOCH_MAX:
            raise StoreError("error", wrong)
        return number

    async def agree(self, offered: bytes) -> bytes:
        """Returns the secret that the store has: 16 hexadecimal digits. Stores `offered` if it has none. Raises StoreError."""
        held = await self.command("GET", self.names.secret)
        if held is None:
            await self.command("SET", self.names.secret, offered, "NX")
            held = await self.command("GET", self.names.secret)
        if not isinstance(held, bytes) or SECRET.fullmatch(held) is None:
            raise StoreError(
                "foreign", f"{self.names.secret} in the store is not a secret of this picker: delete the key"
            )
        return held


async def _answer(connection: Any, within_s: float) -> Any:
    """Returns the next answer. Raises TimeoutError. The client's own limit would return None, which is also an answer."""
    async with asyncio.timeout(within_s):
        return await connection.read_response()


async def _server(address: Address, names: Names, password: str) -> tuple[str, int] | None:
    """Returns host and port of the server to connect to; None for a socket."""
    if address.path:
        return None
    if address.service:
        settings = _common(address.sentinel_user, _sentinel_password(address)) | _tls(address, ssl=True)
        sentinel: Any = _Sentinel(address.hosts, sentinel_kwargs=settings)
        try:
            host, port = await sentinel.discover_master(address.service)
        finally:
            for client in sentinel.sentinels:
                await client.aclose()
        return str(host), int(port)
    if address.cluster:
        host, port = address.hosts[0]
        settings = _common(address.user, password) | _tls(address, ssl=True)
        cluster: Any = RedisCluster(host=host, port=port, **settings)
        try:
            await cluster.initialize()
            node = cluster.get_node_from_key(names.secret)
        finally:
            await cluster.aclose()
        return str(node.host), int(node.port)
    return address.hosts[0]


async def _connected(address: Address, where: tuple[str, int] | None, password: str) -> Any:
    settings = _common(address.user, password) | {"db": address.database, "parser_class": Replies}
    connection: Any
    if where is None:
        connection = UnixDomainSocketConnection(path=address.path, **settings)
    elif address.tls:
        connection = SSLConnection(host=where[0], port=where[1], **_tls(address), **settings)
    else:
        connection = Connection(host=where[0], port=where[1], **settings)
    async with asyncio.timeout(2 * ANSWER_S):
        await connection.connect()
    connection.socket_timeout = (
        None  # with one, the client starts a task for each command; answers have their own limits
    )
    return connection


def _common(user: str, password: str) -> dict[str, Any]:
    return {
        "username": user or None,
        "password": password or None,
        "socket_timeout": ANSWER_S,
        "socket_connect_timeout": ANSWER_S,
        "protocol": 2,
        "driver_info": None,
        "retry": Retry(NoBackoff(), 0),
    }


def _tls(address: Address, *, ssl: bool = False) -> dict[str, Any]:
    """The settings of TLS. `ssl`: for clients, which have a switch for it."""
    if not address.tls:
        return {}
    settings = {
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_ca_certs": address.ca or None,
        "ssl_certfile": address.cert or None,
        "ssl_keyfile": address.key or address.cert or None,
    }
    return settings | ({"ssl": True} if ssl else {})


class _InWords(contextlib.AbstractContextManager[None]):
    """Turns the exceptions of the client into a StoreError whose text has no password. The client never shows that of Sentinel."""

    def __init__(self, address: Address, password: str = "") -> None:
        self._address = address
        self._secrets = [secret for secret in (password, address.password) if secret]

    def __exit__(self, kind: object, failure: BaseException | None, trace: object) -> None:
        if isinstance(failure, StoreError) or not isinstance(failure, Exception):
            return
        text = CLIENT.sub("", str(failure).splitlines()[0])[:200] if str(failure) else type(failure).__name__
        for secret in self._secrets:
            text = text.replace(secret, "***")
        raise StoreError(_why(failure), f"{self._address}: {text}") from None


def _why(failure: Exception) -> str:
    """Returns the label of any failure: what a store sends can make the client raise whatever it likes."""
    if isinstance(failure, NoPermissionError) or DENIED in str(failure):
        return "denied"
    if isinstance(failure, AuthenticationError) or any(sign in str(failure) for sign in REFUSED):
        return "refused"
    if isinstance(failure, OutOfMemoryError):
        return "full"
    if isinstance(failure, ReadOnlyError):
        return "read-only"
    if isinstance(failure, ResponseError):
        text = str(failure).upper()
        return "refused" if text.startswith(("NOAUTH", "WRONGPASS", "INVALID USERNAME")) else "error"
    if isinstance(failure, InvalidResponse):
        return "error"
    if isinstance(failure, TimeoutError) or type(failure).__name__ == "TimeoutError":
        return "slow"
    if isinstance(failure, RedisError | OSError | EOFError):
        return "unreachable"
    return "error"
