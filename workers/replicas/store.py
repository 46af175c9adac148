"""Connects to the store: Redis or Valkey, over TCP, TLS or a socket, alone, behind Sentinel, or as a cluster.

A link is one connection to one server (`connection`); the client library finds the server, if Sentinel or a cluster names it. In a cluster,
all names have one hash tag, so one node has all keys. All replicas listen at this node, because in some versions, a published message
reaches only listeners of the same node.

    <prefix>:1:all             channel of all messages (`wire`)
    <prefix>:1:to:<name>       channel of messages for one replica
    <prefix>:1:secret          the seed of block hashes, unless it comes from a file
    <prefix>:1:epoch           counts the lives of replicas

Channels are the same in all databases of a store. So names have the number of the database behind the 1
(`<prefix>:1:db2:all`), unless it is 0.

Every failure is a StoreError. Its text never has a password.

The first contact, at the start of the picker, runs in a child of the parent, because the parent must not import an event loop before it
forks its other children.
"""

import asyncio
import contextlib
import os
import re
import ssl
from collections.abc import Callable
from typing import Any

from redis.asyncio import RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from workers.host.options import PASSWORD_VARIABLE, ReplicaStore
from workers.replicas.address import Address, ContactAnswer, parse_address
from workers.replicas.connection import CommandRefused, StoreConnection, publishing
from workers.replicas.replies import InvalidReply
from workers.replicas.wire import EPOCH_MAX

ANSWER_S = 0.5  # how long the store may take for one answer, and to accept a connection
CONTACT_S = 6.0
SILENCE_S = 1.0  # a listener that does not hear even its own messages for this long has lost its connection
PASSWORD_BYTES_MAX = 4096
VERSION = 1
SECRET = re.compile(rb"[0-9a-f]{16}")
NUMBER = re.compile(rb"[0-9]{1,19}")
CLIENT = re.compile(r"<redis\..*?> - ")  # how the library names its connection in error texts
REFUSED = ("username-password", "AuthenticationError")  # the library's own error texts may contain these, too
ANSWERS = {  # first word of an error that the store answers -> label
    "NOAUTH": "refused", "WRONGPASS": "refused", "NOPERM": "denied", "OOM": "full", "READONLY": "read-only", "MISCONF": "read-only",
}  # fmt: skip


_Sentinel: Any = Sentinel  # its constructor has no types


class StoreError(Exception):
    """Raised if the store cannot be used. `why`: unreachable, slow, refused (user or password), denied (ACL), full, read-only, error."""

    def __init__(self, why: str, text: str) -> None:
        super().__init__(text)
        self.why = why

    @property
    def permanent(self) -> bool:
        """Whether another attempt is useless until an operator changes a setting."""
        return self.why in ("refused", "denied", "file")


class StoreNames:
    """The names of channels and keys in the store."""

    def __init__(self, prefix: str, *, cluster: bool, database: int = 0) -> None:
        beginning = f"{{{prefix}}}" if cluster and "{" not in prefix else prefix
        self._beginning = f"{beginning}:{VERSION}" + (f":db{database}" if database else "")
        self.all = f"{self._beginning}:all"
        self.secret = f"{self._beginning}:secret"
        self.epoch = f"{self._beginning}:epoch"

    def to(self, name: str) -> str:
        """Returns the channel of one replica."""
        return f"{self._beginning}:to:{name}"


def password_of(address: Address, file: str) -> str:
    """Returns the password: from the file, else from the environment, else from the URL. Raises StoreError if the file cannot be read."""
    if not file:
        return os.environ.get(PASSWORD_VARIABLE) or address.password
    return _password_in(file, "--replica-store-password-file")


def _password_in(file: str, given_by: str) -> str:
    try:
        with open(file, "rb") as opened:
            return opened.read(PASSWORD_BYTES_MAX).decode(errors="replace").strip()
    except OSError as refused:
        raise StoreError("file", f"{given_by} {file} cannot be read: {refused.strerror}") from None


async def opened(store: ReplicaStore, name: str) -> "StoreLink":
    """Connects to the store of the options, as the replica `name`. Raises StoreError."""
    address = parse_address(store.url)
    names = StoreNames(store.prefix, cluster=address.cluster, database=address.database)
    return await StoreLink.open(address, names, password_of(address, store.password_file), name)


class StoreLink:
    """A connection to the store, made by `open`, that listens to the channels of a replica."""

    def __init__(self, address: Address, names: StoreNames, connection: StoreConnection) -> None:
        self._address = address
        self.names = names
        self._connection = connection
        self._to_all = publishing(names.all)
        self._in_words = _InWords(address)

    @classmethod
    async def open(cls, address: Address, names: StoreNames, password: str, name: str) -> "StoreLink":
        """Connects, and subscribes to two channels: the channel of all replicas, and the channel of the replica `name`. Raises
        StoreError.
        """
        with _InWords(address, password):
            where = await _server(address, names, password)
            async with asyncio.timeout(ANSWER_S):
                connection = await StoreConnection.to(where, _tls_context(address))
        link = cls(address, names, connection)
        try:
            login = ("AUTH", address.user or "default", password) if address.user or password else ()
            await link.command("HELLO", 3, *login)
            database = [("SELECT", address.database)] if address.database else []
            await link._commands(*database, *(("SUBSCRIBE", channel) for channel in (names.all, names.to(name))))
        except BaseException:
            link.close()
            raise
        return link

    def listen(self, hear: Callable[[str, bytes], None]) -> None:
        """Passes each message from now on to `hear`: channel, data. If `hear` raises, the link fails."""
        self._connection.hear = lambda channel, data: hear(channel.decode(errors="replace"), data)

    def close(self) -> None:
        """Closes the connection without waiting for answers."""
        self._connection.close()

    async def command(self, *words: str | int | bytes) -> Any:
        """Runs one command, and returns its answer. Raises StoreError."""
        (answer,) = await self._commands(words)
        return answer

    async def _commands(self, *commands: tuple[str | int | bytes, ...]) -> list[Any]:
        """Sends commands together, and returns their answers. Raises StoreError."""
        with self._in_words:
            async with asyncio.timeout(ANSWER_S):
                return await self._connection.ask(*commands)

    def publish(self, channel: str, data: bytes) -> None:
        """Publishes a message without waiting. Raises StoreError if the link has failed."""
        with self._in_words:
            begin = self._to_all if channel == self.names.all else publishing(channel)
            self._connection.send(b"%b$%d\r\n%b\r\n" % (begin, len(data), data))

    @property
    def settled(self) -> bool:
        """Whether the store has answered all commands."""
        return self._connection.settled

    def check(self) -> None:
        """Reads received bytes, and passes messages to the listener. Raises StoreError if the link has failed, or the store was silent for
        too long.
        """
        with self._in_words:
            self._connection.check()
            if self._connection.owed_s() > ANSWER_S or self._connection.silent_s() > SILENCE_S:
                raise TimeoutError("the store does not answer")

    async def epoch(self, least: int) -> int:
        """Returns the number of a new life of a replica: above every earlier one, and at least `least`. Raises StoreError."""
        epoch = await self._counted(1)
        if epoch < least:  # the store has lost what it knew
            epoch = await self._counted(least - epoch)
        return max(epoch, least)

    async def remind(self, least: int) -> None:
        """Makes sure that later numbers will be above `least`, even if the store has lost its number. Raises StoreError."""
        held = await self.command("GET", self.names.epoch)
        known = int(held) if isinstance(held, bytes) and NUMBER.fullmatch(held) else 0
        if known < least:
            await self._counted(least - known)

    async def _counted(self, up: int) -> int:
        """Increments the epoch. Raises StoreError; its text names the key if the key is the reason."""
        wrong = f"{self._address}: {self.names.epoch} in the store is not a number of this picker: delete the key"
        try:
            number = await self.command("INCRBY", self.names.epoch, up)
        except StoreError as refused:
            raise (StoreError("error", f"{wrong} ({refused})") if refused.why == "error" else refused) from None
        if not isinstance(number, int) or not 0 <= number <= EPOCH_MAX:
            raise StoreError("error", wrong)
        return number

    async def agree(self, offered: bytes) -> bytes:
        """Returns the secret in the store: 16 hexadecimal digits. Stores `offered` if the store has no secret. Raises StoreError."""
        held = await self.command("GET", self.names.secret)
        if held is None:
            await self.command("SET", self.names.secret, offered, "NX")
            held = await self.command("GET", self.names.secret)
        if not isinstance(held, bytes) or SECRET.fullmatch(held) is None:
            raise StoreError("foreign", f"{self.names.secret} in the store is not a secret of this picker: delete the key")
        return held


async def _server(address: Address, names: StoreNames, password: str) -> tuple[str, int] | str:
    """Returns host and port of the server to connect to, or the path of a socket."""
    if address.path:
        return address.path
    if address.service:
        file = address.sentinel_password_file
        sentinel_password = _password_in(file, "sentinel_password_file of --replica-store") if file else ""
        settings = _common(address.sentinel_user, sentinel_password) | _tls(address)
        sentinel: Any = _Sentinel(address.hosts, sentinel_kwargs=settings)
        try:
            host, port = await sentinel.discover_master(address.service)
        finally:
            for client in sentinel.sentinels:
                await client.aclose()
        return str(host), int(port)
    if address.cluster:
        host, port = address.hosts[0]
        settings = _common(address.user, password) | _tls(address)
        cluster: Any = RedisCluster(host=host, port=port, **settings)
        try:
            await cluster.initialize()
            node = cluster.get_node_from_key(names.secret)
        finally:
            await cluster.aclose()
        return str(node.host), int(node.port)
    return address.hosts[0]


def _tls_context(address: Address) -> ssl.SSLContext | None:
    """Returns the TLS context of the connection, or None without TLS. Raises StoreError for a wrong file."""
    if not address.tls:
        return None
    try:
        context = ssl.create_default_context(cafile=address.ca or None)
        if address.cert:
            context.load_cert_chain(address.cert, address.key or address.cert)
    except OSError as wrong:
        raise StoreError("file", f"ca, cert or key of --replica-store cannot be used: {wrong}") from None
    return context


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


def _tls(address: Address) -> dict[str, Any]:
    """Returns the TLS settings for the client library."""
    if not address.tls:
        return {}
    return {
        "ssl": True,
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_ca_certs": address.ca or None,
        "ssl_certfile": address.cert or None,
        "ssl_keyfile": address.key or address.cert or None,
    }


class _InWords(contextlib.AbstractContextManager[None]):
    """Turns the exceptions of the client into a StoreError without a password in its text. The client never shows Sentinel's password."""

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
    """Returns the label of any failure."""
    text = str(failure)
    if isinstance(failure, CommandRefused):
        return ANSWERS.get(text.partition(" ")[0], "error")
    if isinstance(failure, AuthenticationError) or any(sign in text for sign in REFUSED):
        return "refused"
    if isinstance(failure, NoPermissionError):
        return "denied"
    if isinstance(failure, ResponseError | InvalidReply):
        return "error"
    if isinstance(failure, TimeoutError) or type(failure).__name__ == "TimeoutError":
        return "slow"
    if isinstance(failure, RedisError | OSError | EOFError):
        return "unreachable"
    return "error"


def contact(store: ReplicaStore, offered: bytes) -> ContactAnswer:
    """Finds out whether the store can be used in each way that the picker needs, and the common secret of block hashes.

    `offered`: the secret to store if the store has none, or empty if the picker needs no secret.
    """
    try:
        return asyncio.run(_contact(store, offered))
    except StoreError as refused:
        return ContactAnswer(refused.why, str(refused), refused.permanent)


async def _contact(store: ReplicaStore, offered: bytes) -> ContactAnswer:
    probe = f"start-{os.urandom(8).hex()}"
    try:
        async with asyncio.timeout(CONTACT_S):
            link = await opened(store, probe)
            try:
                await link.epoch(0)
                heard = asyncio.Event()
                link.listen(lambda channel, data: heard.set())
                await link.command("PUBLISH", link.names.to(probe), b"")
                await heard.wait()
                return ContactAnswer(secret=await link.agree(offered) if offered else b"")
            finally:
                link.close()
    except TimeoutError:
        raise StoreError("slow", f"{parse_address(store.url)}: no answer in {CONTACT_S:.0f} s") from None
