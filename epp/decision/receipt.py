"""Receipts: short encrypted ids. A receipt says why a request went to its endpoint. A client requests it by `x-llm-d-debug: receipt`.

    decision ─ receipt_of ─▶ Receipt ─ Seal.seal ─▶ id, in the response's header ─ Seal.open ─▶ Receipt

A receipt has numbers only: slots of the endpoint table, and the positions of profile and scorer in the configuration. An id is always 92
characters long, and tells a client nothing, because predictions depend on which prompts of other tenants the server has cached. With the
deployment's secret, an operator can open the id, even if the worker has forgotten the decision.
"""

import base64
import binascii
import enum
import hmac
import math
import struct
from hashlib import blake2b
from operator import xor
from typing import Final, NamedTuple

import numpy as np

from epp.candidates import Endpoint
from epp.decision.decision import Decision, ProfileRun
from epp.decision.explain import learned_costs, prefix_match, scores_of
from epp.decision.pipeline import Pipeline
from epp.prefix.prediction import predicted_tokens
from epp.request import Request

HEADER: Final = "x-llm-d-receipt"
VERSION: Final = 2
TAG_PURPOSE: Final = b"epp receipt tag"  # separates the two keys from each other and from other uses of the secret
TEXT_PURPOSE: Final = b"epp receipt text"
TAG_BYTES: Final = 16
SALT_BYTES: Final = 8
LAYOUT: Final = struct.Struct("<BIIIBBBIIIIfif")
ID_BYTES: Final = 1 + TAG_BYTES + SALT_BYTES + LAYOUT.size
ID_CHARS_MAX: Final = 128
NONE: Final = 0xFFFFFFFF  # the slot if there is no endpoint
UNKNOWN: Final = -1  # the number of cached tokens without a prediction
WORD: Final = 0xFFFFFFFF
BYTE: Final = 0xFF


class Reason(enum.IntEnum):
    """Why the picker chose the target."""

    SCORER = 0  # the target has the best total, and one scorer contributes most to its lead
    ONLY = 1  # the target was the only candidate left
    TIED = 2  # the target is one of several with the best total
    PICKER = 3  # the picker plugin chose the target, although another candidate has a better total
    UNSCORED = 4  # no profile ran


class Place(NamedTuple):
    """An endpoint: its slot in the table, and the slot's generation. With the slot NONE, there is no endpoint."""

    slot: int = NONE
    generation: int = 0


class Receipt(NamedTuple):
    """The content of a receipt.

    `at`: seconds since the epoch. `worker`: the worker that decided. `configuration`: the number of the worker's configuration. `request`:
    hash of the request's id. `profile`, `scorer`: positions in the configuration. `margin`: total of the target minus total of the
    runner-up. `cached_tokens`: prompt tokens that the target was predicted to hold, or UNKNOWN. `first_token_s`: predicted time to the
    first token; NaN without a prediction.
    """

    at: int
    worker: int
    configuration: int
    request: int
    reason: Reason
    profile: int
    scorer: int
    target: Place
    runner_up: Place
    margin: float
    cached_tokens: int
    first_token_s: float


class BadReceipt(ValueError):
    """Raised if an id is no receipt of this deployment. The text says why."""


class Seal:
    """Encrypts receipts under the deployment's secret, and opens them.

    This is the construction SIV (Rogaway and Shrimpton, "Deterministic Authenticated-Encryption", 2006) with keyed BLAKE2b: the tag of the
    plain text is also the start of its key stream. The plain text begins with a random salt. Without the salt, equal ids would tell a
    client that two of its requests had equal predictions.
    """

    def __init__(self, secret: int) -> None:
        """`secret`: the 64-bit seed of prefix hashes. Receipts do not reveal the secret."""
        seed = secret.to_bytes(8, "little")
        self._tag_key = blake2b(seed, person=TAG_PURPOSE).digest()
        self._text_key = blake2b(seed, person=TEXT_PURPOSE).digest()

    def seal(self, receipt: Receipt, salt: bytes) -> str:
        """Returns the id of a receipt: base64url of version, tag and encrypted text. `salt`: SALT_BYTES random bytes."""
        assert len(salt) == SALT_BYTES, len(salt)
        plain = salt + LAYOUT.pack(
            receipt.worker & BYTE,
            receipt.at & WORD,
            receipt.configuration & WORD,
            receipt.request,
            receipt.reason,
            receipt.profile & BYTE,
            receipt.scorer & BYTE,
            *receipt.target,
            *receipt.runner_up,
            receipt.margin,
            receipt.cached_tokens,
            receipt.first_token_s,
        )
        tag = self._tag(plain)
        return base64.urlsafe_b64encode(bytes((VERSION,)) + tag + self._crypted(tag, plain)).decode().rstrip("=")

    def open(self, text: str) -> Receipt:
        """Returns the receipt that an id contains. Raises BadReceipt."""
        if len(text) > ID_CHARS_MAX:
            raise BadReceipt(f"a receipt has at most {ID_CHARS_MAX} characters, and this one has {len(text)}")
        try:
            whole = base64.b64decode(text.encode() + b"=" * (-len(text) % 4), b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError):
            raise BadReceipt("a receipt consists of letters, digits, '-' and '_'") from None
        if len(whole) != ID_BYTES or whole[0] != VERSION:
            raise BadReceipt("this is not a receipt, or it is cut off, or one of another version")
        tag = whole[1 : 1 + TAG_BYTES]
        plain = self._crypted(tag, whole[1 + TAG_BYTES :])
        if not hmac.compare_digest(tag, self._tag(plain)):
            raise BadReceipt(
                "this receipt was not made here: it was changed, or is of a picker with another secret "
                "(a picker without --prefix-secret-file and --state-dir has a new secret after each start)"
            )
        worker, at, configuration, request, reason, profile, scorer, *places, margin, cached, first_s = LAYOUT.unpack(plain[SALT_BYTES:])
        target, runner_up = Place(*places[:2]), Place(*places[2:])
        return Receipt(at, worker, configuration, request, Reason(reason), profile, scorer, target, runner_up, margin, cached, first_s)

    def _tag(self, plain: bytes) -> bytes:
        return blake2b(plain, key=self._tag_key, digest_size=TAG_BYTES).digest()

    def _crypted(self, tag: bytes, data: bytes) -> bytes:
        """Returns `data` XOR the key stream of `tag`, which encrypts and decrypts. One digest (64 bytes) is enough for a receipt."""
        stream = blake2b(tag, key=self._text_key).digest()
        return bytes(map(xor, data, stream))


def hash_of(request_id: str) -> int:
    """Returns the hash of a request's id, 32 bits."""
    return int.from_bytes(blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=4).digest(), "little")


def receipt_of(pipeline: Pipeline, request: Request, decision: Decision, *, at: float, worker: int, configuration: int) -> Receipt:
    """Returns the receipt of a decision of `pipeline`. Call it any time after the decision."""
    target = _place(decision.targets[0])
    run = decision.runs.get(decision.primary)
    match = prefix_match(pipeline, request)
    cached = None if match is None else predicted_tokens(match, decision)
    learned = learned_costs(pipeline, request)
    names = [profile.name for profile in pipeline.wiring.profiles]
    reason, scorer, runner_up, margin = Reason.UNSCORED, 0, Place(), 0.0
    if run is not None:
        reason, scorer, runner_up, margin = _why(pipeline, request, decision.primary, run)
    return Receipt(
        at=int(at),
        worker=worker,
        configuration=configuration,
        request=hash_of(request.id),
        reason=reason,
        profile=names.index(decision.primary) if decision.primary in names else BYTE,
        scorer=scorer,
        target=target,
        runner_up=runner_up,
        margin=margin,
        cached_tokens=UNKNOWN if cached is None else min(cached, 2**31 - 1),
        first_token_s=math.nan if run is None or learned is None else learned.predicted_s(run.row),
    )


def _why(pipeline: Pipeline, request: Request, primary: str, run: ProfileRun) -> tuple[Reason, int, Place, float]:
    """Returns the reason, the position of the scorer that decided, the runner-up, and the margin."""
    first, totals = run.picked[0], run.totals
    rivals = np.delete(np.arange(len(totals)), first)
    if not len(rivals):
        return Reason.ONLY, 0, Place(), 0.0
    second = int(rivals[int(np.argmax(totals[rivals]))])
    margin = float(totals[first] - totals[second])
    runner_up = _place(run.candidates.endpoint(second))
    if margin <= 0.0:
        return (Reason.PICKER if margin < 0.0 else Reason.TIED), 0, runner_up, margin
    wired = next(profile for profile in pipeline.wiring.profiles if profile.name == primary)
    leads = [weight * float(scores[first] - scores[second]) for _, weight, scores in scores_of(request, wired, run)]
    return Reason.SCORER, leads.index(max(leads)) if leads else 0, runner_up, margin


def _place(endpoint: Endpoint) -> Place:
    return Place(endpoint.slot & WORD, endpoint.generation & WORD)
