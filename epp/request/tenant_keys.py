"""API keys of tenants: reads a file of keys, and finds the tenant of a key.

    # one line per key: the tenant, then the SHA-256 of the key
    acme sha256:93b1…0c7e

Only hashes are kept. A key is compared in constant time, so the time of a refusal tells nothing about the keys that exist. No error message
quotes a line, because a line may contain a key by mistake.

SHA-256 costs more than the rest of the search for a tenant, and clients repeat their keys. So a faster hash of 128 bits (XXH3, seeded with
the file's hashes) finds the last headers with a right key again. This makes no comparison weaker. A wrong key is never remembered: it is
hashed and compared each time. Somebody who does not know a key does not know its fast hash either, so another text passes for the key with
a chance of 1 in 2^128. Times do not tell how much of a fast hash is right: a dictionary reads the bytes of an entry only if 64 bits of a
hash of the fast hash are equal. After a reload, no header is remembered.
"""

import hashlib
import hmac
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from xxhash import xxh3_128_digest

from epp.request.client_headers import TENANT_RULE, names_tenant

FAULTS_MAX: Final = 20
HASHED: Final = "sha256:"
HEX_DIGITS: Final = 64
HOW: Final = "printf %s KEY | sha256sum"
BEARER: Final = "bearer "
# Digests are grouped by their first bytes. An attacker who learns from times that a bucket exists does not know one bit of a key.
BUCKET_BYTES: Final = 4
NOTHING: Final = ((bytes(HEX_DIGITS // 2), ""),)
_HEX: Final = re.compile(r"[0-9a-fA-F]*")
_COMMENT: Final = re.compile(r"\s#.*")

ACCEPTED_MAX: Final = 4096  # headers with a right key that are remembered

Buckets = Mapping[bytes, tuple[tuple[bytes, str], ...]]


class Fault(NamedTuple):
    """Describes what is wrong in a line. `line`: counted from 1; 0 means the whole file."""

    line: int
    why: str
    hint: str


class Keys:
    """The keys of one file. `text`: the text of the file."""

    def __init__(self, text: str, digests: Mapping[bytes, str]) -> None:
        """`digests`: SHA-256 of a key -> the key's tenant."""
        self.text = text
        buckets: dict[bytes, tuple[tuple[bytes, str], ...]] = {}
        for digest, tenant in digests.items():
            bucket = digest[:BUCKET_BYTES]
            buckets[bucket] = (*buckets.get(bucket, ()), (digest, tenant))
        self._buckets = buckets
        self._seed = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "little")
        self._accepted: dict[bytes, str] = {}  # the fast hash of a header's value -> the tenant of its key

    def tenant(self, value: str) -> str:
        """Returns the tenant of the key in a header's value; "" for an unknown key. The value may begin with the word Bearer."""
        fast = xxh3_128_digest(value.encode("latin-1", "replace"), self._seed)
        found = self._accepted.get(fast)
        if found is not None:
            return found
        found = self._compared(value)
        if found:
            if len(self._accepted) >= ACCEPTED_MAX:  # one key has many spellings: blanks, and the case of Bearer
                self._accepted.clear()
            self._accepted[fast] = found
        return found

    def _compared(self, value: str) -> str:
        key = value[len(BEARER) :].strip() if value[: len(BEARER)].lower() == BEARER else value
        presented = hashlib.sha256(key.encode("latin-1", "replace")).digest()
        found = ""
        for digest, tenant in self._buckets.get(presented[:BUCKET_BYTES], NOTHING):
            if hmac.compare_digest(digest, presented):
                found = tenant
        return found


def parse(text: str) -> tuple[Keys, list[Fault]]:
    """Reads the text of a file of keys. Returns its keys, and at most FAULTS_MAX faults; if there is a fault, do not use the keys."""
    digests: dict[bytes, str] = {}
    lines: dict[bytes, int] = {}
    faults: list[Fault] = []
    for number, raw in enumerate(text.split("\n"), 1):
        line = _COMMENT.sub("", raw).strip()
        if not line or line[0] == "#":
            continue
        entry = _entry(line)
        if isinstance(entry, Fault):
            faults.append(entry._replace(line=number))
        elif entry[0] in digests:
            faults.append(Fault(number, f"the same key as in line {lines[entry[0]]}", "a key stands for one tenant: remove a line"))
        else:
            digests[entry[0]], lines[entry[0]] = entry[1], number
    if not digests and not faults:
        hint = "a file that was cut off looks like this; to accept no keys, remove the source from tenants.from"
        faults.append(Fault(0, "the file has no key", hint))
    return Keys(text, digests), faults[:FAULTS_MAX]


def _entry(line: str) -> Fault | tuple[bytes, str]:
    """Returns the digest and the tenant of a line, or what is wrong with the line."""
    tenant, _, word = line.replace("\t", " ").rpartition(" ")
    tenant = tenant.strip()
    if not word.startswith(HASHED):
        why = "there is no hash of a key" if tenant else "a line has a tenant and a hash"
        return Fault(0, why, f"write TENANT {HASHED}HEX, where HEX comes from: {HOW}")
    digits = word[len(HASHED) :]
    if len(digits) != HEX_DIGITS or not _HEX.fullmatch(digits):
        return Fault(0, f"{HASHED} is not followed by {HEX_DIGITS} hexadecimal digits", f"take those of: {HOW}")
    if not names_tenant(tenant):
        why = "the tenant's name is not valid" if tenant else "the tenant is missing"
        return Fault(0, why, TENANT_RULE)
    return bytes.fromhex(digits), tenant
