"""Makes inputs from inputs: pieces dropped, doubled, swapped, taken from other seeds, and bytes changed within a piece.

If a target can cut its inputs (`Target.parts`), the mutator changes whole pieces. Lengths and checksums around them stay right, so that
the change reaches the code behind them. One mutation in eight still treats the input as plain bytes.
"""

import random
from collections.abc import Sequence

from tests.fuzz.target import Target

NUMBERS = (0, 1, 2, 4, 5, 8, 9, 16, 32, 63, 64, 100, 127, 128, 254, 255)
WIDE = tuple(v.to_bytes(4, "big") for v in (0, 1, 0x7F, 0x80, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF))
LONG = 0.02  # share of the inputs that are blown up


class Mutator:
    """Makes inputs for one target. The same seed makes the same inputs."""

    def __init__(self, target: Target, rng: random.Random, seeds: Sequence[bytes]) -> None:
        self._target = target
        self._rng = rng
        self._seeds = list(seeds) or [b""]
        self._library = [part for seed in self._seeds for part in target.parts(seed)][:4000] or [b""]

    def fresh(self) -> bytes:
        """A mutation of a random seed."""
        return self.mutated(self._rng.choice(self._seeds))

    def mutated(self, data: bytes) -> bytes:
        rng, target = self._rng, self._target
        if rng.random() < 0.125:
            changed = data
            for _ in range(rng.choice((1, 1, 2, 4))):
                changed = self._bytes(changed)
            return changed[: target.bytes_max]
        parts = target.parts(data)
        for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
            self._parts(parts)
        if rng.random() < LONG and parts:
            self._blow_up(parts)
        return target.whole(parts)[: target.bytes_max]

    def _parts(self, parts: list[bytes]) -> None:
        rng = self._rng
        at = rng.randrange(len(parts) + 1)
        action = rng.randrange(8)
        if action < 3 and at < len(parts):
            parts[at] = self._bytes(parts[at])
        elif action == 3 and at < len(parts):
            del parts[at : at + rng.choice((1, 1, 2, 5))]
        elif action == 4 and at < len(parts):
            parts[at:at] = parts[at : at + rng.choice((1, 1, 3))] * rng.choice((1, 1, 2, 7))
        elif action == 5 and len(parts) > 1:
            other = rng.randrange(len(parts))
            at = min(at, len(parts) - 1)
            parts[at], parts[other] = parts[other], parts[at]
        elif action == 6:
            seed = self._target.parts(rng.choice(self._seeds))
            begin = rng.randrange(len(seed) + 1)
            parts[at:at] = seed[begin : begin + rng.choice((1, 2, 4, 16))]
        else:
            parts.insert(at, rng.choice(self._library))

    def _blow_up(self, parts: list[bytes]) -> None:
        """Repeats some pieces many times, so that the cost of one of them becomes visible."""
        rng = self._rng
        at = rng.randrange(len(parts))
        span = parts[at : at + rng.choice((1, 2, 3, 4))]
        size = max(1, sum(map(len, span)))
        parts[at:at] = span * (rng.choice((2048, 16384, self._target.bytes_max)) // size)

    def _bytes(self, data: bytes) -> bytes:
        rng = self._rng
        at = rng.randrange(len(data) + 1)
        action = rng.randrange(9)
        words = self._target.words
        if action == 0 and data:
            at = min(at, len(data) - 1)
            return data[:at] + bytes((data[at] ^ 1 << rng.randrange(8),)) + data[at + 1 :]
        if action == 1:
            return data[:at] + bytes((rng.choice(NUMBERS),)) + data[at + 1 :]
        if action == 2:
            return data[:at] + data[at + rng.choice((1, 1, 2, 4, 16, 64)) :]
        if action == 3:
            return data[:at] + rng.randbytes(rng.choice((1, 1, 2, 5, 20))) + data[at:]
        if action == 4:
            return data[:at] + rng.choice(WIDE) + data[at + 4 :]
        if action == 5 and words:
            return data[:at] + rng.choice(words) + data[at:]
        if action == 6 and words:
            word = rng.choice(words)
            return data[:at] + word + data[at + len(word) :]
        if action == 7:
            piece = data[at : at + rng.choice((1, 2, 8, 30))]
            return data[:at] + piece * rng.choice((2, 3, 40)) + data[at:]
        other = rng.choice(self._library)
        return data[:at] + other[rng.randrange(len(other) + 1) :]
