"""Measures prefix affinity with 100 endpoints: the time from a chat's body to the endpoints that hold its prefix, and of an insert."""

import json
import random
from collections.abc import Callable, Iterator
from itertools import cycle

import numpy as np

from epp.plugin import NoParams
from epp.plugins.parsers.openai import OpenAI
from epp.prefix.blocks import Hashes, block_hashes, landmarks
from epp.request import Request
from shm.prefix_index import IndexReader, IndexSchema
from shm.prefix_writer import IndexWriter
from shm.segment import Region
from tests.bench.cases import Case

ENDPOINTS = 100
BLOCK_BYTES = 256
SECRET = 0x9E3779B97F4A7C15
SIZES = (("1 KB", 1_000, 20.0), ("8 KB", 8_000, 40.0), ("400 KB", 400_000, 500.0))
REQUESTS_PER_LOOK = 20  # of 8 KB, half of them new: a supervisor's backlog in the pipes after 4 ms at 5,000 requests/s


def prefix_cases() -> Iterator[Case]:
    """Yields cases for hashing and matching chats, and for inserts."""
    schema = IndexSchema(1 << 20)
    region = Region(memoryview(bytearray(schema.bytes)))
    writer, reader = IndexWriter(schema, region), IndexReader(schema, region)
    owners = [writer.new_owner() for _ in range(ENDPOINTS)]
    for label, size, target in SIZES:
        for shape, body in (("", chat(size)), (" of content parts", chat(size, parts=True))):
            yield Case(f"canonical bytes of a chat{shape}, {label}", canonical(body))
        prompt = canonical(chat(size))()
        half = block_hashes(prompt, BLOCK_BYTES, 1, SECRET)[: max(1, size // BLOCK_BYTES // 2)]
        for owner in owners[::10]:
            writer.insert(landmarks(half), owner, 1)
        yield Case(
            f"hash and match of {label}, a tenth of {ENDPOINTS} endpoints holds half",
            lambda prompt=prompt: reader.match(block_hashes(prompt, BLOCK_BYTES, 1, SECRET)),
            target,
        )
    batch = 16 * REQUESTS_PER_LOOK
    held_by = np.array(owners * batch, dtype=np.uint16)[:batch]
    rng = np.random.default_rng(1)
    known = random_blocks(rng, batch)
    writer.insert(known, held_by, 1)
    yield Case(f"insert {batch} known blocks, each", lambda: writer.insert(known, held_by, 2), 0.3, batch)
    fresh = cycle([random_blocks(rng, batch) for _ in range(1024)])
    yield Case(f"insert {batch} new blocks, each", lambda: writer.insert(next(fresh), held_by, 3), 0.3, batch)


def chat(size: int, *, parts: bool = False) -> bytes:
    """Returns a conversation of about `size` bytes, in messages of at most 2 KB."""
    rng = random.Random(size)
    texts = ["".join(rng.choices("abcdefghij klmnop " * 4 + "\n", k=min(size, 1950))) for _ in range(max(1, size // 2000))]
    content = [[{"type": "text", "text": text}] if parts else text for text in texts]
    messages = [{"role": "user" if i % 2 else "assistant", "content": c} for i, c in enumerate(content)]
    return json.dumps({"model": "m", "messages": messages}).encode()


def canonical(body: bytes) -> Callable[[], bytes]:
    """Returns a call for the parser's second pass, which makes the canonical bytes of a parsed body."""
    request = Request(id="", path="/v1/chat/completions", headers={}, now=0.0)
    OpenAI("openai-parser", NoParams()).parse(request, request.path, body)
    return request.prompt._make


def random_blocks(rng: np.random.Generator, count: int) -> Hashes:
    return rng.integers(1, 2**63, count, dtype=np.uint64)
