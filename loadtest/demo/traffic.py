"""Simulates users who chat: conversations with shared system prompts grow turn by turn, in a closed loop with time to think.

The seed determines everything that a user says, and the simulated servers always give the same answer to a prompt. So a second run
with the same seed sends the same requests at any speed. (user, conversation, turn) identifies a request; two runs are compared over the
requests that both have finished.

This module does not choose a server, and does not retry a request.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import aiohttp
import msgspec

from epp.request.client_headers import FAIRNESS_ID

ASSISTANTS = 6
SYSTEM_BYTES = (2_000, 8_000)
QUESTION_BYTES = (400, 4_000)
TURNS = (4, 9)
CONVERSATIONS_PER_USER = 2
ANSWER_TOKENS = (24, 56)
THINK_S = (0.1, 0.7)
START_WITHIN_S = 1.0
TIMEOUT_S = 60.0
SYLLABLES = ("ka", "lo", "mi", "ten", "ru", "sol", "va", "ne", "dor", "pi", "quil", "as", "tem", "o", "bren", "fi")

Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a user's script: its key, the user's text, the length of the answer, and the pause before the request."""

    key: Key
    question: str
    answer_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one request. Times are in seconds since the request was sent. `error`: "" if there was an answer."""

    key: Key
    error: str = ""
    first_token_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class Conversation:
    """A conversation: its number, its length in turns, and its messages so far."""

    number: int
    turns: int
    messages: list[dict[str, str]]
    turn: int = 0


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details = msgspec.field(default_factory=_Details)


class _Delta(msgspec.Struct):
    content: str = ""


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_chunk = msgspec.json.Decoder(_Chunk)


def text(rng: random.Random, size: int) -> str:
    """Returns random words of about `size` bytes."""
    words: list[str] = []
    left = size
    while left > 0:
        word = "".join(rng.choices(SYLLABLES, k=rng.randint(1, 3)))
        words.append(word)
        left -= len(word) + 1
    return " ".join(words)


def system_prompts(seed: int) -> list[str]:
    """Returns one system prompt per assistant. Every conversation begins with one of them."""
    rng = random.Random(f"{seed}/assistants")
    return [f"You are assistant {n}. " + text(rng, rng.randint(*SYSTEM_BYTES)) for n in range(ASSISTANTS)]


class User:
    """Makes the script of one user. The caller adds the assistant's answer to the conversation, and the next turn continues from it."""

    def __init__(self, number: int, seed: int, assistants: list[str]) -> None:
        self.number = number
        self._assistants = assistants
        self._rng = random.Random(f"{seed}/{number}")
        self._begun = 0
        self._open = [self._begin() for _ in range(CONVERSATIONS_PER_USER)]

    def _begin(self) -> Conversation:
        system = {"role": "system", "content": self._rng.choice(self._assistants)}
        self._begun += 1
        return Conversation(self._begun - 1, self._rng.randint(*TURNS), [system])

    def turns(self) -> Iterator[tuple[Turn, Conversation]]:
        """Yields requests without end. The user's conversations take turns. When one is over, a new one takes its place."""
        rng = self._rng
        while True:
            for place, conversation in enumerate(self._open):
                key = (self.number, conversation.number, conversation.turn)
                question = text(rng, rng.randint(*QUESTION_BYTES))
                conversation.messages.append({"role": "user", "content": question})
                yield Turn(key, question, rng.randint(*ANSWER_TOKENS), rng.uniform(*THINK_S)), conversation
                conversation.turn += 1
                if conversation.turn >= conversation.turns:
                    self._open[place] = self._begin()


@dataclass(slots=True)
class Run:
    """Runs all users of one phase, and keeps their results. The caller sets `predicted_share` from the picker's metrics.

    `late_s`: how late each pause of a user ended. If the machine is busy, pauses end late, and the measured times are wrong by as much.
    """

    url: str
    model: str
    users: int
    seed: int
    results: list[Result] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    predicted_share: float | None = None

    async def go(self) -> None:
        """Runs all users until it is cancelled, and then sets `seconds` to the duration."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            await self._all()
        finally:
            self.seconds = loop.time() - begun

    async def _all(self) -> None:
        assistants = system_prompts(self.seed)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as group:
            for number in range(self.users):
                group.create_task(self._user(session, User(number, self.seed, assistants)))

    async def _user(self, session: aiohttp.ClientSession, user: User) -> None:
        await asyncio.sleep(START_WITHIN_S * user.number / self.users)
        loop = asyncio.get_running_loop()
        for turn, conversation in user.turns():
            due = loop.time() + turn.think_s
            await asyncio.sleep(turn.think_s)
            self.late_s.append(loop.time() - due)
            pieces: list[str] = []
            result = await self._ask(session, turn, conversation, pieces.append)
            self.results.append(result)
            if result.error:
                # do not repeat requests in a tight loop if the gateway refuses them at once
                await asyncio.sleep(THINK_S[1])
            conversation.messages.append({"role": "assistant", "content": "".join(pieces)})

    async def _ask(self, session: aiohttp.ClientSession, turn: Turn, conversation: Conversation, add: Callable[[str], None]) -> Result:
        """Sends one streamed chat completion. Calls `add` with each piece of the answer."""
        loop = asyncio.get_running_loop()
        body = {
            "model": self.model,
            "messages": conversation.messages,
            "max_tokens": turn.answer_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent = loop.time()
        first = 0.0
        usage = _Usage()
        headers = {"content-type": "application/json", FAIRNESS_ID[0]: f"user-{turn.key[0]}"}
        try:
            async with session.post(self.url, data=msgspec.json.encode(body), headers=headers) as response:
                if response.status != 200:
                    return Result(turn.key, error=f"status {response.status}: {(await response.text())[:200]}")
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = _chunk.decode(line[6:])
                    usage = chunk.usage or usage
                    for choice in chunk.choices:
                        if choice.delta.content:
                            first = first or loop.time() - sent
                            add(choice.delta.content)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            return Result(turn.key, error=f"{type(error).__name__}: {error}")
        if not first:
            return Result(turn.key, error="the answer has no text")
        total = loop.time() - sent
        return Result(turn.key, "", first, total, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens)
