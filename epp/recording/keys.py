"""Keyed hashes in the place of names: a recording says which requests have equal names, but not what the names are.

Flows, objectives and header values are hashed under a key that follows from the deployment's secret. A reader of the recording who lacks
the secret cannot confirm a guess. Only request ids are hashed without the secret, so that `epp explain --trace` finds a request by its id.
An id is recorded only if it is a UUID: 122 random bits, which nobody guesses. Other ids may be any text of a client, and are not recorded.
"""

from hashlib import blake2b
from typing import Final

from xxhash import xxh3_64_intdigest

from compiled import calls

KEPT_MAX: Final = 4096
HASH_BYTES: Final = 8
PURPOSE: Final = b"epp recording"


class Keyed:
    """Hashes names under the deployment's secret. Keeps the hashes of the last names, because requests repeat them."""

    def __init__(self, secret: int) -> None:
        """`secret`: the 64-bit seed of prefix hashes. The hashes of names do not reveal the secret."""
        self._key = blake2b(secret.to_bytes(HASH_BYTES, "little"), person=PURPOSE).digest()
        self._kept: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        """Returns the hash of a text: 64 bits, never 0. For an empty text, returns 0."""
        found = self._kept.get(text)
        if found is None:
            if len(self._kept) >= KEPT_MAX:  # bounded, because clients choose names
                self._kept.clear()
            found = self._kept[text] = self._hashed(text) if text else 0
        return found

    @property
    def identity(self) -> int:
        """A number that is equal for equal secrets: the hash of a fixed text that is no name."""
        return self._hashed("\0")

    def _hashed(self, text: str) -> int:
        digest = blake2b(text.encode("utf-8", "surrogatepass"), key=self._key, digest_size=HASH_BYTES).digest()
        return int.from_bytes(digest, "little") or 1


def id_hash(text: str) -> int:
    """Returns the hash of a request id as the client writes it: 64 bits; 0 if the id is no UUID."""
    return xxh3_64_intdigest(text.encode()) or 1 if calls.is_uuid(text) else 0
