"""Counts the blocks of several prompts."""

from collections.abc import Sequence


class Blocks:
    """How many prompts have each block. `block in blocks`: whether any has it. Prompts are chains: a block implies those before it."""

    __slots__ = ("_users",)

    def __init__(self) -> None:
        self._users: dict[int, int] = {}

    def __contains__(self, block: object) -> bool:
        return block in self._users

    def __len__(self) -> int:
        return len(self._users)

    def add(self, hashes: Sequence[int]) -> None:
        """Adds a prompt."""
        users = self._users
        for block in hashes:
            users[block] = users.get(block, 0) + 1

    def remove(self, hashes: Sequence[int]) -> None:
        """Removes a prompt that was added."""
        users = self._users
        for block in hashes:
            left = users[block] - 1
            if left:
                users[block] = left
            else:
                del users[block]

    def count_with(self, hashes: Sequence[int]) -> int:
        """Returns how many different blocks there would be with this prompt."""
        users = self._users
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in users:
                low = middle + 1
            else:
                high = middle
        return len(users) + len(hashes) - low
