"""Small recordings for the tests of replays: requests to servers whose times follow a formula."""

from collections.abc import Sequence
from pathlib import Path

from epp.recording.records import VERSION, Batch, Decided, Ended, EndpointList, Member, Opened, Record, batch, frame
from loadtest.replay.reading import Asked, Lifetime
from loadtest.replay.runs import HASH_BYTES
from workers.shared.recording import Frame, Limits
from workers.shared.recording.files import RecordFiles

OVERHEAD_S, PREFILL_S, DECODE_S = 0.02, 0.0001, 0.01
TOKENS = 64
OUTPUT = 11
NAN = float("nan")
RANDOM = """\
plugins:
- {type: random-picker}
schedulingProfiles:
- {name: default, plugins: [{pluginRef: random-picker}]}
"""


def ints(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


def chained(words: Sequence[int]) -> bytes:
    """Returns block hashes, each of which stands for all words up to its own."""
    return ints(*(hash(tuple(words[:end])) % (1 << 64) for end in range(1, len(words) + 1)))


def blocks(hashes: bytes) -> list[bytes]:
    """Returns the hashes one by one."""
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


def request(number: int, at: float) -> list[Record]:
    """One request to an idle server, with a prompt that no other request shares."""
    blocks = 1 + number % 5
    hashes = ints(*(1000 * number + block for block in range(blocks)))
    first = OVERHEAD_S + blocks * TOKENS * PREFILL_S + DECODE_S
    decided = Decided(
        number, 0, at, 0.001, 1, "m", "", 0, 0, 0, None, True, 100, OUTPUT, blocks * TOKENS, TOKENS, hashes, 1, None, b"", None, None, [],
        [number % 2], "",
    )  # fmt: skip
    ended = Ended(number, 200, number % 2, first, first + (OUTPUT - 1) * DECODE_S, True, True, 100, blocks * TOKENS, 0, OUTPUT)
    return [decided, ended]


def write(folder: Path, count: int, more: Sequence[Record] = (), later: Sequence[Record] = ()) -> str:
    """Writes `count` requests, one a second, to two servers. `more`: further records of the supervisor, `later`: after the requests."""
    members = [Member(0.0, True, slot, 0, "default", f"pod-{slot}", f"10.0.0.{slot + 1}:8000", {}) for slot in range(2)]
    requests = [record for number in range(1, count + 1) for record in request(number, float(number))]
    worker = [Batch(1, 0), EndpointList(1, ints(0, 1), ints(0, 0)), *requests]
    files = RecordFiles(str(folder), "epp", Limits())
    batches = [batch([Opened(VERSION, "", 1, 5000.0, 0.0, 1), *members, *more]), batch(worker), batch(list(later))]
    files.put(Frame(1, frame(batches), 1))
    files.end()
    return str(folder)


def asked(at: float, *blocks: int, target: int = 0, lasted: float = 0.5, output: int = OUTPUT, **fields: object) -> Asked:
    """Returns a recorded request, with one token per unit of a block of TOKENS."""
    size = len(blocks) * TOKENS
    values = {
        "at": at, "model": "m", "target_model": "", "flow": 0, "priority": 0, "ttl_s": None, "streaming": True, "body_bytes": 100,
        "max_tokens": output, "prompt_tokens": size, "block_tokens": TOKENS, "hashes": ints(*blocks), "facts": (), "headers": (),
        "waited_s": 0.0, "prompt": size, "output": output, "target": target, "first_s": 0.1, "lasted_s": lasted, "cached": 0,
        "expected": 0, "answered": True,
    } | fields  # fmt: skip
    return Asked(**values)  # type: ignore[arg-type]


def lifetime(slot: int, joined: float = 0.0, left: float = float("inf"), down: tuple[tuple[float, float], ...] = ()) -> Lifetime:
    """Returns an endpoint that is there from `joined` to `left`."""
    member = Member(joined, True, slot, 0, "default", f"pod-{slot}", f"10.0.0.{slot + 1}:8000", {})
    return Lifetime(member, joined, left, down)
