"""Chats with several turns, and what the picker predicted of them against what the engine reported."""

import json
import random
import statistics
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from loadtest.demo.stack import get
from tests.e2e.cluster import CHAT, Picker, ask, eventually
from tests.engines.servers import MODEL

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
PAGES: Final = ("operations.md", "kubernetes.md", "plugins.md")
SYSTEM_WORDS: Final = 150
TURN_WORDS: Final = (5, 60)


class Turn(NamedTuple):
    """The tokens of one request that were predicted and reported as cached. `known_by`: `precise`, or why they were predicted otherwise."""

    predicted: int
    reported: int
    known_by: str = ""

    @property
    def error(self) -> int:
        return abs(self.predicted - self.reported)


def converse(gateway: int, picker: Picker, *, chats: int, turns: int, systems: int = 3, **more: Any) -> list[Turn]:
    """Holds chats in turns. `systems`: the number of different system prompts. `more`: fields of each request."""
    random_ = random.Random(1)
    words = " ".join((DOCS / page).read_text() for page in PAGES).split()

    def text(count: int) -> str:
        begin = random_.randrange(len(words) - count)
        return " ".join(words[begin : begin + count])

    prompts = [text(SYSTEM_WORDS) for _ in range(systems)]
    open_chats = [[{"role": "system", "content": prompts[n % systems]}] for n in range(chats)]
    found: list[Turn] = []
    for _ in range(turns):
        for messages in random_.sample(open_chats, chats):
            messages.append({"role": "user", "content": text(random_.randint(*TURN_WORDS))})
            turn, answer = _turn(gateway, picker, messages, more)
            messages.append({"role": "assistant", "content": answer})
            found.append(turn)
    assert sum(turn.reported > 0 for turn in found) >= len(found) / 2, f"hardly any turn was cached: {found}"
    return found


def _turn(gateway: int, picker: Picker, messages: Sequence[dict[str, str]], more: dict[str, Any]) -> tuple[Turn, str]:
    number = uuid.uuid4().hex
    body = {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0, "ignore_eos": True, **more}
    answer = ask(gateway, CHAT, json.dumps(body).encode(), {"x-request-id": number})
    assert answer.status == 200, answer.body
    said = answer.json()
    decision = decided(picker, number)
    details = said["usage"]["prompt_tokens_details"] or {}
    (profile,) = decision["profiles"]
    turn = Turn(decision["cached"]["predicted"], details.get("cached_tokens") or 0, profile["candidates"][0]["prefix_cache"])
    return turn, said["choices"][0]["message"]["content"] or ""


def decided(picker: Picker, number: str) -> dict[str, Any]:
    """Returns the picker's decision about a request that has ended."""
    found: list[Any] = []

    def ended() -> bool:
        page = json.loads(get(picker.metrics, f"/debug/decisions?request_id={number}") or b"{}")
        found[:] = page.get("decisions", [])
        return bool(found) and bool(found[0].get("cached"))

    assert eventually(ended), (number, found)
    decision: dict[str, Any] = found[0]
    return decision


def exact(turns: Sequence[Turn]) -> float:
    """Returns the share of predictions that are right."""
    return statistics.mean(not turn.error for turn in turns)


def within(turns: Sequence[Turn], tokens: int) -> float:
    """Returns the share of predictions that are wrong by at most so many tokens."""
    return statistics.mean(turn.error <= tokens for turn in turns)


def mean_error(turns: Sequence[Turn]) -> float:
    return statistics.mean(turn.error for turn in turns)
