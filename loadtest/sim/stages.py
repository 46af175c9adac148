"""Simulates the routing sidecar of a decode server: lets other servers encode and prefill, before this server decodes.

A request goes first to the servers that its headers name, as through the sidecar in front of a vLLM decode server. The images and other
media items are distributed over the encoders in turn. Then the whole request, with one token to generate, goes to the prefill server.
The prefill server's answer says where the KV blocks are (`kv_transfer_params`), and the decode server loads these blocks instead of
computing the prompt. If the answer has no `kv_transfer_params`, the decode server computes the prompt itself. If a stage fails, the
request is answered with an error.

Only servers with a decoding role have a sidecar. Other servers ignore the headers. A stage is never retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from loadtest.sim.request import ApiError

PREFILLER = b"x-prefiller-host-port"
ENCODERS = b"x-encoder-hosts-ports"
ROLE_LABEL = "llm-d.ai/role"
ROLES = ("prefill", "decode", "encode", "prefill-decode", "encode-prefill", "encode-prefill-decode", "both")
DECODING = frozenset(("decode", "prefill-decode", "encode-prefill-decode", "both"))
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MEDIA = frozenset(("image_url", "audio_url", "video_url", "input_audio"))
ENCODERS_MAX = 64
MEDIA_MAX = 256
STAGE_S_MAX = 600.0
ASK_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

Address = tuple[str, int]


class StageAnswer(NamedTuple):
    """The answer of another server."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes

    @property
    def server(self) -> str:
        return self.headers.get(b"x-sim-server", b"").decode("latin-1")


@dataclass(frozen=True, slots=True)
class Served:
    """The names of the servers that served the stages; `prefiller` is "" if none prefilled.

    `cached_tokens`: prompt tokens that were cached on the prefill server; None if the decode server computes the prompt.
    """

    encoders: tuple[str, ...] = ()
    prefiller: str = ""
    cached_tokens: int | None = None

    def headers(self) -> bytes:
        """Returns response header lines that name the servers."""
        lines = [f"x-sim-encoders: {','.join(self.encoders)}\r\n"] if self.encoders else []
        lines += [f"x-sim-prefiller: {self.prefiller}\r\n"] if self.prefiller else []
        return "".join(lines).encode()


@dataclass(frozen=True, slots=True)
class Stages:
    """The servers that a request names for the stages before decode."""

    prefiller: Address | None
    encoders: tuple[Address, ...]

    @classmethod
    def named(cls, headers: Mapping[bytes, bytes]) -> Stages | None:
        """Returns the stages that the headers name; None if there are no such headers. Raises ApiError."""
        prefiller, encoders = headers.get(PREFILLER, b""), headers.get(ENCODERS, b"")
        if not prefiller and not encoders:
            return None
        addresses = encoders.split(b",") if encoders else []
        if len(addresses) > ENCODERS_MAX:
            raise ApiError(400, f"{ENCODERS.decode()} names {len(addresses)} servers; the limit is {ENCODERS_MAX}")
        return cls(address(prefiller) if prefiller else None, tuple(map(address, addresses)))

    async def run(self, path: bytes, raw: bytes) -> Served:
        """Sends the request to the encoders, then to the prefill server. Raises ApiError."""
        try:
            body = msgspec.json.decode(raw)
            async with asyncio.timeout(STAGE_S_MAX):
                encoders = await self._encode(path, body)
                return await self._prefill(path, body, encoders)
        except (OSError, EOFError, TimeoutError, ValueError, msgspec.MsgspecError) as problem:
            raise ApiError(502, f"a stage failed: {type(problem).__name__}") from None

    async def _encode(self, path: bytes, body: dict[str, Any]) -> tuple[str, ...]:
        items = media(body) if self.encoders else []
        calls = [
            post(self.encoders[n % len(self.encoders)], path, one_token(body, [{"role": "user", "content": [item]}]))
            for n, item in enumerate(items)
        ]
        return tuple([_good(answer).server for answer in await asyncio.gather(*calls)])

    async def _prefill(self, path: bytes, body: dict[str, Any], encoders: tuple[str, ...]) -> Served:
        if self.prefiller is None:
            return Served(encoders)
        answer = _good(await post(self.prefiller, path, one_token(body) | {"kv_transfer_params": ASK_REMOTE_DECODE}))
        fields = msgspec.json.decode(answer.body)
        cached = ((fields.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        transferable = bool((fields.get("kv_transfer_params") or {}).get("do_remote_prefill"))
        return Served(encoders, answer.server, cached if transferable else None)


def address(text: bytes) -> Address:
    """Parses `host:port` or `[host]:port`. Raises ApiError."""
    host, colon, port = text.decode("latin-1").strip().rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise ApiError(400, f"{text[:64].decode('latin-1')!r} is not the host:port of a stage")
    return host.strip("[]"), int(port)


def media(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the images and other media items of a chat, in order. Raises ApiError."""
    items = []
    for message in body.get("messages") or ():
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        items += [part for part in parts if isinstance(part, dict) and part.get("type") in MEDIA]
    if len(items) > MEDIA_MAX:
        raise ApiError(400, f"the request has {len(items)} media items; the limit is {MEDIA_MAX}")
    return items


def one_token(body: dict[str, Any], messages: list[Any] | None = None) -> dict[str, Any]:
    """Returns a copy of the request that is unstreamed and generates one token. `messages`: replace those in the request, if not None."""
    changed = {key: value for key, value in body.items() if key != "stream_options"}
    limits = [key for key in LIMITS if key in body] or LIMITS[:1]
    changed |= {"stream": False} | dict.fromkeys(limits, 1)
    return changed if messages is None else changed | {"messages": messages}


async def post(to: Address, path: bytes, body: dict[str, Any]) -> StageAnswer:
    """Sends one request on a new connection. Raises OSError, EOFError or ValueError."""
    raw = msgspec.json.encode(body)
    reader, writer = await asyncio.open_connection(*to)
    try:
        writer.write(
            b"POST %s HTTP/1.1\r\nHost: stage\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
            b"Connection: close\r\n\r\n%s" % (path, len(raw), raw)
        )
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).rstrip(b"\r\n").split(b"\r\n")
        pairs = (line.partition(b":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        content = await reader.readexactly(int(headers.get(b"content-length", b"0")))
        return StageAnswer(int(first.split(b" ")[1]), headers, content)
    finally:
        writer.close()


def _good(answer: StageAnswer) -> StageAnswer:
    if answer.status != 200:
        raise ApiError(answer.status, f"a stage answered {answer.status}: {answer.body[:200].decode('latin-1')}")
    return answer
