"""Counts of what became of entries of the prefix index, from its control words."""

from shm.prefix_index import DROPPED, EVICTIONS, GONE, OVER_CAPACITY, TAKEN_BACK


class Counts:
    """Reads from the control words what became of entries."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    @property
    def evictions(self) -> int:
        """Live entries that were overwritten because their buckets were full."""
        return self._words[EVICTIONS]

    @property
    def over_capacity(self) -> int:
        """Entries freed because they exceeded the capacity of their owner."""
        return self._words[OVER_CAPACITY]

    @property
    def gone(self) -> int:
        """Entries freed because their owner has left."""
        return self._words[GONE]

    @property
    def taken_back(self) -> int:
        """Entries that `forget` freed."""
        return self._words[TAKEN_BACK]

    @property
    def dropped(self) -> int:
        """Blocks that were not inserted: their owner was not live, or they got no bucket in `ROUNDS_MAX` rounds."""
        return self._words[DROPPED]

    def freed(self) -> dict[str, int]:
        """Returns how many entries were freed, by cause."""
        return {
            "full": self.evictions,
            "capacity": self.over_capacity,
            "gone": self.gone,
            "taken_back": self.taken_back,
        }
