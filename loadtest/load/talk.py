"""Makes the texts of simulated users: plain words, always the same for a number, and long enough that caching them saves time."""

import random
from typing import Final

COMMON: Final = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which one you were all
her she there would their we him been has when who will no more if out so up said what its about than into them can only other
time new some could these two may first then do any like my now over such our man me even most made after also did many off
"""
WORDS: Final = COMMON.split()
SYSTEM_PROMPTS: Final = 4  # shared by all users
SYSTEM_WORDS: Final = 600


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def system_prompt(number: int) -> str:
    """Returns one of a few long system prompts. Many conversations share each of them."""
    return f"You are assistant {number}. " + words(random.Random(f"system {number}"), SYSTEM_WORDS)


def document(number: int, size: int) -> str:
    """Returns a text of about `size` bytes, about which users ask several questions."""
    return f"Document {number}. " + words(random.Random(f"document {number}"), size // 4)
