"""The routing sidecar of a simulated decode server: encode and prefill elsewhere, then decode here.

A request that names other servers in its headers goes to them first, as it would through the sidecar that stands before a vLLM
decode server: each image or the like to one of the encoders, in turn, then the whole request with one token to generate to the
prefill server, which answers where its KV blocks are (`kv_transfer_params`). The decode server then takes over the blocks instead
of computing the prompt. An error of a stage is the answer to the request. Without `kv_transfer_params` in the prefill server's
answer the decode server computes the prompt itself.

Only servers whose role decodes have a sidecar; others ignore the headers. What this does not do: retry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from loadtest.sim_api import ApiError

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


class Answer(NamedTuple):
    """What another server said."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes

    @property
    def server(self) -> str:
        return self.headers.get(b"x-sim-server", b"").decode("latin-1")


@dataclass(frozen=True, slots=True)
class Served:
    """Who served the stages. `cached_tokens` is the prefill server's count; None: the prompt is computed here."""

    encoders: tuple[str, ...] = ()
    prefiller: str = ""
    cached_tokens: int | None = None

    def headers(self) -> bytes:
        """Header lines that tell the client."""
        lines = [f"x-sim-encoders: {','.join(self.encoders)}\r\n"] if self.encoders else []
        lines += [f"x-sim-prefiller: {self.prefiller}\r\n"] if self.prefiller else []
        return "".join(lines).encode()


@dataclass(frozen=True, slots=True)
class Stages:
    """Whom a request asks for before it is decoded."""

    prefiller: Address | None
    encoders: tuple[Address, ...]

    @classmethod
    def named(cls, headers: Mapping[bytes, bytes]) -> Stages | None:
        """None: nobody. Raises ApiError."""
        prefiller, encoders = headers.get(PREFILLER, b""), headers.get(ENCODERS, b"")
        if not prefiller and not encoders:
            return None
        many = encoders.split(b",") if encoders else []
        if len(many) > ENCODERS_MAX:
            raise ApiError(400, f"{ENCODERS.decode()} names {len(many)} servers, at most {ENCODERS_MAX}")
        return cls(address(prefiller) if prefiller else None, tuple(map(address, many)))

    async def run(self, path: bytes, raw: bytes) -> Served:
        """Encode, then prefill. Raises ApiError."""
        try:
            body = msgspec.json.decode(raw)
            async with asyncio.timeout(STAGE_S_MAX):
                encoders = await self._encode(path, body)
                return await self._prefill(path, body, encoders)
        except (OSError, EOFError, TimeoutError, ValueError, msgspec.MsgspecError) as problem:
            raise ApiError(502, f"a stage failed: {type(problem).__name__}") from None

    async def _encode(self, path: bytes, body: dict[str, Any]) -> tuple[str, ...]:
        items = media(body) if self.encoders else []
        asked = [
            post(self.encoders[n % len(self.encoders)], path, one_token(body, [{"role": "user", "content": [item]}]))
            for n, item in enumerate(items)
        ]
        return tuple([_good(answer).server for answer in await asyncio.gather(*asked)])

    async def _prefill(self, path: bytes, body: dict[str, Any], encoders: tuple[str, ...]) -> Served:
        if self.prefiller is None:
            return Served(encoders)
        answer = _good(await post(self.prefiller, path, one_token(body) | {"kv_transfer_params": ASK_REMOTE_DECODE}))
        said = msgspec.json.decode(answer.body)
        cached = ((said.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        transferable = bool((said.get("kv_transfer_params") or {}).get("do_remote_prefill"))
        return Served(encoders, answer.server, cached if transferable else None)


def address(text: bytes) -> Address:
    """`host:port` or `[host]:port`. Raises ApiError."""
    host, colon, port = text.decode("latin-1").strip().rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise ApiError(400, f"{text[:64].decode('latin-1')!r} is no host:port of a stage")
    return host.strip("[]"), int(port)


def media(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Images and the like of a chat, in order."""
    found = []
    for message in body.get("messages") or ():
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        found += [part for part in parts if isinstance(part, dict) and part.get("type") in MEDIA]
    if len(found) > MEDIA_MAX:
        raise ApiError(400, f"the request has {len(found)} media, at most {MEDIA_MAX}")
    return found


def one_token(body: dict[str, Any], messages: list[Any] | None = None) -> dict[str, Any]:
    """The same request, unstreamed and for one token; `messages` instead of its own."""
    changed = {key: value for key, value in body.items() if key != "stream_options"}
    limits = [key for key in LIMITS if key in body] or LIMITS[:1]
    changed |= {"stream": False} | dict.fromkeys(limits, 1)
    return changed if messages is None else changed | {"messages": messages}


async def post(to: Address, path: bytes, body: dict[str, Any]) -> Answer:
    """One request on a connection of its own."""
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
        answered = await reader.readexactly(int(headers.get(b"content-length", b"0")))
        return Answer(int(first.split(b" ")[1]), headers, answered)
    finally:
        writer.close()


def _good(answer: Answer) -> Answer:
    if answer.status != 200:
        raise ApiError(answer.status, f"a stage answered {answer.status}: {answer.body[:200].decode('latin-1')}")
    return answer
