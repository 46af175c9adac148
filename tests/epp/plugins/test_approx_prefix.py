"""Prefix affinity from sent prompts: which blocks are learned, and which are taken back if a server did not compute them."""

import tracemalloc
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.data import CACHE_BLOCK_SIZE, CACHE_TOKENS
from epp.decision.decision import PREFILL, Decision, ProfileRun, Response
from epp.plugins.parsers.openai import OpenAI
from epp.plugins.producers import _sent_prompts
from epp.plugins.producers._sent_prompts import (
    COMPARED_MAX,
    KEPT_AT_ONCE,
    KEPT_MAX,
    KEPT_S,
    LONG_BLOCKS,
    PROMPTS_MAX,
    RECENT_MAX,
    REFRESH_S,
)
from epp.plugins.producers.approx_prefix import ApproximatePrefix
from epp.prefix.match import APPROXIMATE, prefix_match
from epp.request import Request
from epp.request.tokens import TOKENS, Feature, PromptTokens, TokenizedPrompt
from tests.epp.plugins.parser_bodies import parsed
from tests.examples import examples
from tests.fakes import FakeServices, candidates, request

MATCH = prefix_match(APPROXIMATE)
BLOCK = 256
POOL = candidates({"waiting_requests": [0.0] * 3})


class World:
    """The producer of one worker, with an index."""

    def __init__(self, **params: object) -> None:
        self.services = FakeServices()
        self.producer = ApproximatePrefix(APPROXIMATE, ApproximatePrefix.Params(**params))  # type: ignore[arg-type]
        self.producer.start(self.services)

    def send(self, prompt: bytes | Request, row: int, prefill: int | None = None) -> tuple[Request, Decision]:
        r = request(prompt) if isinstance(prompt, bytes) else prompt
        runs: dict[str, ProfileRun | None] = {"default": ProfileRun(POOL, np.zeros(3), (row,))}
        if prefill is not None:
            runs[PREFILL] = ProfileRun(POOL, np.zeros(3), (prefill,))
        targets = runs["default"].targets  # type: ignore[union-attr]
        decision = Decision(targets, runs, "default")
        self.producer.produce(r, POOL)
        self.producer.before_send(r, decision)
        return r, decision

    def answered(self, sent: tuple[Request, Decision], status: int) -> None:
        """Reports an answer that came whole."""
        response = Response(status)
        response.whole = status > 0
        self.producer.response_complete(*sent, response)

    def held(self, prompt: bytes) -> list[float] | None:
        return self.held_of(request(prompt))

    def held_of(self, r: Request) -> list[float] | None:
        self.producer.produce(r, POOL)
        match = r[MATCH]
        return None if match.blocks is None else match.blocks.tolist()


def prompt(*letters: str) -> bytes:
    return b"".join(letter.encode() * BLOCK for letter in letters)


def test_what_apart_the_hashes_of_two_salts_are_depends_on_the_text() -> None:
    world = World()

    def hashes(text: bytes, salt: str) -> list[int]:
        r = request(text, cache_salt=salt)
        world.producer.produce(r, POOL)
        return r[MATCH].hashes.tolist()

    def apart(text: bytes, one: str, other: str) -> list[int]:
        return [(a - b) % (1 << 64) for a, b in zip(hashes(text, one), hashes(text, other), strict=True)]

    for other in ("bee", ""):
        found = [apart(prompt("a", letter, "z"), "acme", other) for letter in "bcd"]
        assert found[0][0] == found[1][0] and len({tuple(each[1:]) for each in found}) == len({each[1] for each in found}) == 3


def test_salts_separate_prompts_and_long_salts_are_not_cached() -> None:
    world = World()
    salts = [f"{n}{'s' * 50_000}" for n in range(20)]
    for salt in ("", *salts[:10]):
        world.send(request(prompt("a"), cache_salt=salt), 1)
    assert [world.held_of(request(prompt("a"), cache_salt=salt)) for salt in salts] == [[0, 1, 0]] * 10 + [None] * 10
    tracemalloc.start()
    try:
        for n in range(100):
            world.held_of(request(prompt("a"), cache_salt=f"{n}{'t' * 50_000}"))
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("status", "kept"), [(200, True), (204, True), (302, True), (400, False), (503, False)])
def test_learned_blocks_are_taken_back_if_the_server_answers_with_an_error(status: int, kept: bool) -> None:
    world = World()
    sent = world.send(prompt("a", "b"), 1)
    assert world.held(prompt("a", "b")) == [0, 2, 0]
    world.answered(sent, status)
    assert world.held(prompt("a", "b")) == ([0, 2, 0] if kept else None)


def test_learned_blocks_are_taken_back_if_there_is_no_answer() -> None:
    world = World()
    world.answered(world.send(prompt("a"), 2), 0)
    assert world.held(prompt("a")) is None


def test_only_blocks_that_the_failed_request_added_are_taken_back() -> None:
    world = World()
    for turn in range(6):
        letter, now = chr(ord("c") + turn), turn // 2 * REFRESH_S  # known blocks are learned again at every other turn
        world.answered(world.send(request(prompt("a", "b"), now=now), 1), 200)
        world.answered(world.send(request(prompt("a", "b", letter, "y"), now=now), 1), 500)
        world.answered(world.send(request(prompt("a", "b", letter), now=now), 2), 500)
        assert world.held(prompt("a", "b", letter, "y")) == [0, 2, 0]


def learned(world: World) -> list[tuple[int, int]]:
    """Returns a list that gets (blocks, owner) of all that the index learns from now on."""
    seen: list[tuple[int, int]] = []
    learn = world.services.learn
    world.services.learn = lambda hashes, owner: (seen.append((len(hashes), owner)), learn(hashes, owner))  # type: ignore[method-assign, assignment, func-returns-value]
    return seen


def test_the_index_learns_again_what_a_server_uses_at_most_once_a_second() -> None:
    """So it knows which blocks the server keeps."""
    world = World()
    world.answered(world.send(prompt("a", "b"), 1), 200)
    seen = learned(world)
    for now in (0.5, 1.0, 1.5, 2.0):
        world.answered(world.send(request(prompt("a", "b"), now=now), 1), 200)
    assert [blocks for blocks, _ in seen] == [2, 2]
    world.send(request(prompt("a", "b", "c"), now=2.0), 1)
    assert [blocks for blocks, _ in seen] == [2, 2, 1]


def test_the_index_learns_a_prompt_again_while_its_answer_lasts_and_at_its_end() -> None:
    """A server drops no block that a request uses, and counts from the end of the request how long a block is unused."""
    world = World()
    lasting = world.send(prompt("a", "b", "c"), 1)
    owner = POOL.snapshot.endpoints[1].owner
    seen = learned(world)

    def others(now: float) -> list[tuple[int, int]]:
        """Returns what the index learns when another request of the worker comes and ends."""
        seen.clear()
        world.answered(world.send(request(prompt("z"), now=now), 2), 200)
        return [each for each in seen if each[1] == owner]

    def ends(now: float) -> list[tuple[int, int]]:
        seen.clear()
        lasting[0].now = now
        world.answered(lasting, 200)
        return seen

    assert [others(now) for now in (0.9 * KEPT_S, KEPT_S, 1.9 * KEPT_S, 2.0 * KEPT_S)] == [[], [(3, owner)], [], [(3, owner)]]
    assert ends(2.0 * KEPT_S + REFRESH_S) == [(3, owner)]
    assert [others(now) for now in (4.0 * KEPT_S, 9.0 * KEPT_S)] == [[], []]


def test_an_answer_that_ends_soon_teaches_the_index_nothing_more() -> None:
    world = World()
    sent = world.send(prompt("a"), 1)
    seen = learned(world)
    sent[0].now = 0.9 * REFRESH_S
    world.answered(sent, 200)
    assert seen == []


def test_a_request_that_fails_after_its_blocks_were_learned_again_leaves_none() -> None:
    world = World()
    sent = world.send(prompt("a", "b"), 1)
    world.send(request(prompt("z"), now=KEPT_S), 2)
    sent[0].now = KEPT_S
    world.answered(sent, 500)
    world.send(request(prompt("z"), now=3.0 * KEPT_S), 2)
    assert world.held(prompt("a", "b")) is None


def test_a_prompt_at_an_endpoint_that_has_left_is_not_learned_again() -> None:
    """Another endpoint may get its owner id while the answer still comes."""
    world = World()
    leaving = world.send(prompt("a", "b"), 1)
    owner = POOL.snapshot.endpoints[1].owner
    rows = POOL.snapshot.endpoint_list.row_of_owner
    row = rows.pop(owner)
    try:
        world.send(request(prompt("z"), now=KEPT_S), 2)
    finally:
        rows[owner] = row
    seen = learned(world)
    world.send(request(prompt("z"), now=3.0 * KEPT_S), 2)
    leaving[0].now = 4.0 * KEPT_S
    world.answered(leaving, 200)
    assert owner not in {each for _, each in seen}


def test_only_so_many_requests_in_progress_are_learned_again() -> None:
    world = World()
    for row in (*[0] * KEPT_MAX, 1):
        world.send(prompt("a"), row)
    seen = learned(world)
    for _ in range(KEPT_MAX // KEPT_AT_ONCE + 1):
        world.send(request(prompt("z"), now=KEPT_S), 2)
    assert {owner for _, owner in seen} == {POOL.snapshot.endpoints[row].owner for row in (0, 2)}


def test_a_long_prompt_is_taken_back_as_a_whole() -> None:
    world = World()
    letters = [chr(ord("A") + n // 10) + str(n % 10) for n in range(300)]
    world.answered(world.send(b"".join(x.encode() * (BLOCK // 2) for x in letters), 1), 500)
    assert not any(world.services.held.values())


def test_both_servers_of_a_disaggregated_request_are_recorded_and_both_taken_back() -> None:
    world = World()
    world.send(prompt("a"), 0)
    sent = world.send(prompt("a", "b"), 0, prefill=2)
    assert world.held(prompt("a", "b")) == [2, 0, 2]
    world.answered(sent, 502)
    assert world.held(prompt("a", "b")) == [1, 0, 0]


def tokenised(*prompts: str) -> Request:
    r = request(b"x")
    made = [PromptTokens(np.frombuffer(prompt(*letters), "<u4").astype(np.uint32)) for letters in prompts]
    r[TOKENS] = TokenizedPrompt(made)
    return r


def test_each_of_several_prompts_is_taken_back_as_far_as_it_was_new() -> None:
    world = World()
    world.answered(world.send(tokenised("ab", "p"), 1), 200)
    before = {block for block, owners in world.services.held.items() if owners}
    world.answered(world.send(tokenised("abc", "pq", "z"), 1), 500)
    assert {block for block, owners in world.services.held.items() if owners} == before


def completions(*prompts: str) -> Request:
    texts = [prompt(*letters).decode() for letters in prompts]
    return parsed(OpenAI, "/v1/completions", {"model": "m", "prompt": texts if len(texts) > 1 else texts[0]})


PROMPTS = st.lists(st.text("abc", max_size=5), min_size=2, max_size=6).filter(any)


@given(several=PROMPTS, data=st.data())
@examples(60)
def test_each_of_several_prompts_is_found_alone_and_in_any_order(several: list[str], data: st.DataObject) -> None:
    world = World()
    sent, _ = world.send(completions(*several), 1)
    assert sent[MATCH].total == sum(map(len, several))
    for letters in filter(None, several):
        assert world.held_of(completions(letters)) == [0, len(letters), 0]
    again = completions(*data.draw(st.permutations(several)))
    assert world.held_of(again) == [0, sent[MATCH].total, 0]
    longer = [letters and letters + "z" for letters in several]
    assert world.held_of(completions(*longer)) == [0, sent[MATCH].total, 0]


def test_blocks_that_another_request_shares_with_a_failed_one_stay() -> None:
    world = World()
    one = world.send(prompt("a", "b", "c"), 1)
    other = world.send(prompt("a", "b", "d"), 1)  # finds a and b, which the first request has added
    world.answered(one, 503)
    assert world.held(prompt("a", "b", "c")) == [0, 2, 0]
    assert world.held(prompt("a", "b", "d")) == [0, 3, 0]
    world.answered(other, 503)
    assert not any(world.services.held.values())


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_if_all_requests_with_a_new_prefix_fail_none_of_its_blocks_stays(order: tuple[int, ...]) -> None:
    world = World()
    learn, world.services.learn = world.services.learn, lambda hashes, owner: later.append((hashes, owner))  # type: ignore[method-assign]
    later: list[tuple[np.ndarray, int]] = []
    sent = [world.send(prompt("a", "b", letter), 1) for letter in "cde"]
    for hashes, owner in later:  # when they were sent, no request saw the blocks of the others in the index
        learn(hashes, owner)
    for number in order[:-1]:
        world.answered(sent[number], 500)
        assert world.held(prompt("a", "b")) == [0, 2, 0]
    world.answered(sent[order[-1]], 500)
    assert not any(world.services.held.values())


def test_equal_requests_to_other_servers_do_not_keep_the_blocks_of_a_failed_one() -> None:
    world = World()
    failed, _ = world.send(prompt("a"), 1), world.send(prompt("a"), 2)
    world.answered(failed, 500)
    assert world.held(prompt("a")) == [0, 0, 1]


def test_a_bounded_number_of_requests_is_remembered() -> None:
    world = World()
    failed = world.send(prompt("a"), 1)
    world.send(prompt("a", "b"), 1)
    for turn in range(RECENT_MAX):
        world.send(prompt(chr(ord("c") + turn)), 2)
    world.answered(failed, 500)
    assert world.held(prompt("a")) is None


def test_fewer_long_prompts_are_remembered() -> None:
    world = World()
    for turn in range(40):
        world.send(prompt(*[f"{turn:02}{n:06}" for n in range(8 * LONG_BLOCKS)])[: 8 * LONG_BLOCKS * BLOCK], 1)
    assert sum(len(sent.hashes) for sent in world.producer._sent.recent) < 2 * RECENT_MAX * LONG_BLOCKS
    failed = world.send(prompt("a"), 1)
    world.send(prompt("a", "b"), 1)
    world.answered(failed, 500)
    assert world.held(prompt("a")) == [0, 1, 0]


def test_many_failed_prompts_are_compared_with_a_bounded_number_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[object] = []
    shared = _sent_prompts._shared
    monkeypatch.setattr(_sent_prompts, "_shared", lambda *pair: compared.append(pair) or shared(*pair))
    world = World()
    crowd = ["a" + "bcdefgh"[n % 7] for n in range(PROMPTS_MAX)]
    sent = [world.send(completions(*crowd), 1) for _ in range(3)]
    for each in sent:
        compared.clear()
        world.answered(each, 500)
        assert len(compared) <= COMPARED_MAX
    assert not any(world.services.held.values())


def test_tokenised_prompts_with_different_images_differ() -> None:
    def showing(content: str) -> Request:
        r = request(b"x")
        ids = np.full(256, 9, np.uint32)
        r[TOKENS] = TokenizedPrompt([PromptTokens(ids, [Feature("image", content, 64, 64)])])
        return r

    world = World()
    world.send(showing("cat"), 1)
    assert world.held_of(showing("cat")) == [0, 4, 0]
    assert world.held_of(showing("dog")) == [0, 1, 0]


@pytest.mark.parametrize(("params", "columns"), [({}, (CACHE_BLOCK_SIZE, CACHE_TOKENS)), ({"auto_tune": False}, (CACHE_BLOCK_SIZE,))])
def test_the_cache_sizes_of_servers_are_read_only_for_tuning_and_their_blocks_always(
    params: Mapping[str, object], columns: tuple[object, ...]
) -> None:
    assert tuple(World(**params).producer.consumes) == columns


def test_all_parameters_have_an_effect_and_by_default_a_prompt_matches_in_full_length() -> None:
    assert list(World(auto_tune=False, lru_capacity_per_server=5).producer.without_effect) == []
    world = World()
    long = bytes(range(256)) * 4000
    r, _ = world.send(long, 1)
    assert r[MATCH].total == len(long) // BLOCK
    assert world.held(long) == [0, 4000, 0]


@pytest.mark.parametrize(
    ("params", "blocks"),
    [
        ({"max_prefix_tokens_to_match": 1}, 1),
        ({"max_prefix_tokens_to_match": 640, "max_prefix_blocks_to_match": 5}, 10),
        ({"max_prefix_blocks_to_match": 5}, 5),
        ({"block_size_tokens": 128, "max_prefix_tokens_to_match": 640}, 5),
    ],
)
def test_a_limit_on_the_matched_length_keeps_at_least_one_block(params: Mapping[str, object], blocks: int) -> None:
    r, _ = World(**params).send(bytes(range(256)) * 40, 1)
    assert r[MATCH].total == blocks


@pytest.mark.parametrize(
    ("params", "remarks"),
    [
        ({}, []),
        ({"block_size_tokens": 32}, ["blockSizeTokens: 32 is below the minimum; blocks have 64 tokens"]),
        ({"block_size": 16, "block_size_tokens": 128}, ["blockSize: has no effect because blockSizeTokens is set"]),
        (
            {"max_prefix_tokens_to_match": 640, "max_prefix_blocks_to_match": 5},
            ["maxPrefixBlocksToMatch: has no effect because maxPrefixTokensToMatch is set"],
        ),
    ],
)
def test_parameters_that_others_override_are_reported(params: Mapping[str, object], remarks: list[str]) -> None:
    producer = World(**params).producer
    assert list(producer.without_effect) == remarks
    assert not producer.deprecated


def test_the_older_name_of_the_block_size_works_and_is_reported_as_deprecated() -> None:
    producer = World(block_size=128).producer
    assert producer.block_tokens == 128
    assert producer.deprecated == {"blockSize": "blockSizeTokens"}


def document(question: str) -> bytes:
    return prompt(*"abcdefghij") + question.encode() * BLOCK


def second_worker(first: World) -> World:
    """Returns a worker that sees the prefills of the first one at once, and what it teaches the index never."""
    other = World()
    other.services.prefills = first.services.prefills
    other.producer.start(other.services)
    return other


def streamed(world: World, sent: tuple[Request, Decision]) -> None:
    world.producer.response_streaming(*sent)


def test_other_workers_see_a_prefill_at_once_and_until_the_first_token() -> None:
    first = World()
    other = second_worker(first)
    sent = first.send(document("x"), 1)
    asked = request(document("y"))
    assert other.held_of(asked) == [0, 10, 0]
    assert [(p.owner, p.blocks, p.tokens) for p in asked[MATCH].under_way] == [(2, 10, 704.0)]
    streamed(first, sent)
    assert other.held(document("y")) is None


@pytest.mark.parametrize("headers", [True, False])
def test_a_request_that_is_cancelled_before_its_first_token_leaves_nothing(headers: bool) -> None:
    first = World()
    other = second_worker(first)
    sent = first.send(document("x"), 1)
    first.producer.response_complete(*sent, Response(200 if headers else 0))
    assert other.held(document("x")) is None
    assert first.held(document("x")) is None


def test_a_request_that_is_cancelled_after_its_first_token_leaves_its_blocks() -> None:
    world = World()
    sent = world.send(document("x"), 1)
    streamed(world, sent)
    world.producer.response_complete(*sent, Response(200))
    assert world.held(document("x")) == [0, 11, 0]


@pytest.mark.parametrize("in_pieces", [True, False])
def test_a_sibling_that_has_waited_confirms_the_prefix_even_if_the_first_request_is_cancelled(in_pieces: bool) -> None:
    first = World()
    other = second_worker(first)
    cancelled = first.send(document("x"), 1)
    waited = other.send(document("y"), 1)
    assert other.services.held.keys() == set(waited[0][MATCH].hashes[10:].tolist())
    first.producer.response_complete(*cancelled, Response())
    if in_pieces:
        streamed(other, waited)
    other.answered(waited, 200)
    assert other.held(document("z")) == [0, 10, 0]


def test_the_prefill_endpoint_shows_the_prefill() -> None:
    world = World()
    world.send(document("x"), 0, prefill=2)
    asked = request(document("y"))
    world.held_of(asked)
    assert [p.owner for p in asked[MATCH].under_way] == [3]
