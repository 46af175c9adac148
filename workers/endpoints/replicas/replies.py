"""Reads the answers of the store, each of at most REPLY_BYTES_MAX, so that a store that lies cannot fill the memory.

It refuses a size before it waits for the bytes, and counts each line as LINE_BYTES.
"""

from typing import Any, Final

from redis._parsers import _AsyncRESP2Parser
from redis.exceptions import InvalidResponse

from workers.endpoints.replicas.wire import MESSAGE_BYTES_MAX

REPLY_BYTES_MAX: Final = 2 * MESSAGE_BYTES_MAX
LINE_BYTES: Final = 4096  # what each line counts as, so that an array of many small elements fails early

_Parser: Any = _AsyncRESP2Parser  # it has no types


class Replies(_Parser):  # type: ignore[misc]
    """The client's parser of RESP 2, with a limit. Raises InvalidResponse beyond it."""

    _left = REPLY_BYTES_MAX

    async def read_response(self, *arguments: Any, **options: Any) -> Any:
        self._left = REPLY_BYTES_MAX
        return await super().read_response(*arguments, **options)

    async def _readline(self) -> bytes:
        line: bytes = await super()._readline()
        self._take(len(line) + LINE_BYTES)
        return line

    async def _read(self, length: int) -> bytes:
        self._take(length)
        data: bytes = await super()._read(length)
        return data

    def _take(self, size: int) -> None:
        self._left -= size
        if size < 0 or self._left < 0:
            raise InvalidResponse(f"an answer has a negative size or more than {REPLY_BYTES_MAX} bytes")
