"""Describes the KV events of one endpoint, and says what is wrong with them. This code does no I/O: messages go in, text comes out."""

from collections import Counter
from typing import Final

import msgspec

from epp.prefix.kv_events import Event, MalformedBatch, Removed, Stored, decode, is_read, topic_parts
from workers.host.printable import printable

SHOWN_CHARS_MAX: Final = 128
KINDS_MAX: Final = 16  # the number of remembered topics and block sizes


class ExpectedEvents(msgspec.Struct, frozen=True, kw_only=True):
    """The picker's expectations of an endpoint. `block_tokens` 0 and `model` "" accept every value. `events`: how many events are
    enough.
    """

    topic: str
    block_tokens: int = 0
    model: str = ""
    events: int = 10


class Heard:
    """Collects the messages of one endpoint, and finds what is wrong with them."""

    def __init__(self, wanted: ExpectedEvents) -> None:
        self.wanted = wanted
        self.messages = 0
        self.events = 0  # events in the messages that the picker would read
        self.malformed: Counter[str] = Counter()
        self.topics: Counter[str] = Counter()
        self.other_topics: Counter[str] = Counter()
        self.block_sizes: Counter[int] = Counter()
        self.adapters: Counter[str] = Counter()

    @property
    def enough(self) -> bool:
        return max(self.events, self.other_topics.total()) >= self.wanted.events

    def take(self, topic: bytes, number: int, payload: bytes) -> list[str]:
        """Takes one message, and returns a line about each of its events. `topic`: empty in replays of older engines.

        `number`: the message's own number, or -1 if the message does not have the frames of an event message.
        """
        self.messages += 1
        if number < 0:
            self.malformed["a message has not the three frames topic, number and payload"] += 1
            return []
        ours = is_read(topic, self.wanted.topic.encode())
        self._count(self.topics if ours else self.other_topics, shown(topic.decode("utf-8", "replace")))
        if not ours:
            return []
        try:
            batch = decode(payload)
        except MalformedBatch as problem:
            self.malformed[f"a payload is {shown(str(problem))}"] += 1
            return []
        if batch.malformed:
            self.malformed["an event is not one of vLLM or SGLang"] += batch.malformed
        self.events += len(batch.events)
        return [f"  {number}  {self._line(event)}" for event in batch.events]

    def problems(self) -> list[str]:
        """Returns the faults with their fixes. The list is empty if the picker can follow this endpoint."""
        found = [f"{text} ({count} times)" for text, count in self.malformed.items()]
        wanted = self.wanted
        if self.other_topics and not self.topics:
            names = ", ".join(repr(name) for name in self.other_topics)
            found.append(
                f"other topic: its topics are {names}, and topicFilter is {wanted.topic!r}; give the server a topic that begins "
                "with it, or set kvEventsConfig.topicFilter"
            )
        if wanted.block_tokens and (others := sorted(self.block_sizes.keys() - {wanted.block_tokens})):
            found.append(
                f"other block size: its blocks have {', '.join(map(str, others))} tokens, and blockSizeTokens is "
                f"{wanted.block_tokens}; the picker uses the server's size, so remove blockSizeTokens or set it to the server's"
            )
        models = {model for topic in self.topics if (model := topic_parts(topic.encode())[1])}
        if wanted.model and models and wanted.model not in models:
            found.append(
                f"other model: its topic names {', '.join(sorted(map(repr, models)))}, and token-producer has modelName "
                f"{wanted.model!r}; with another tokenizer no block ever matches"
            )
        if self.messages and not self.events and not found:
            found.append("its messages have no events")
        return found

    def summary(self) -> str:
        """Returns a line about all messages so far."""
        sizes = ", ".join(map(str, sorted(self.block_sizes))) or "unknown"
        names = f"; adapters {', '.join(sorted(self.adapters))}" if self.adapters else ""
        return f"{self.events} events in {self.messages} messages; blocks of {sizes} tokens{names}"

    def _line(self, event: Event) -> str:
        match event:
            case Stored():
                if event.tokens is None:
                    return f"holds {len(event.hashes)} known blocks in {event.tier}"
                self._count(self.block_sizes, event.block_tokens)
                adapter = ""
                if name := event.adapter or (f"number {event.adapter_id}" if event.adapter_id is not None else ""):
                    self._count(self.adapters, shown(name))
                    adapter = f", adapter {shown(name)}"
                follows = "a prompt begins" if event.parent is None else "a prompt goes on"
                return f"holds {len(event.hashes)} blocks of {event.block_tokens} tokens in {event.tier}{adapter}: {follows}"
            case Removed():
                return f"removed {len(event.hashes)} blocks from {event.tier}"
            case _:
                return "holds nothing any more"

    def _count(self, counter: "Counter[str] | Counter[int]", key: str | int) -> None:
        if key in counter or len(counter) < KINDS_MAX:
            counter[key] += 1  # type: ignore[index]


def shown(text: str) -> str:
    """Returns the beginning of a server's text, SHOWN_CHARS_MAX characters, escaped."""
    return printable(text[:SHOWN_CHARS_MAX])
