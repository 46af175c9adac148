"""Requests go to endpoints that encoded their images before."""

import msgspec
import numpy as np

from epp.candidates import Candidates
from epp.decision.decision import Decision, ProfileRun
from epp.plugins.producers import media_cache
from epp.plugins.producers.media_cache import MediaCache
from epp.plugins.scorers.media_cache import MediaCacheScorer
from epp.prefix.blocks import WIDE
from epp.request import Request
from epp.request.tokens import NO_MEDIA, TOKENS, Feature, MediaMatch, PromptTokens, TokenizedPrompt, media_match
from tests.epp.plugins.calls import PROFILE
from tests.fakes import FakeServices, candidates, request

MATCH = media_match("")


def producer(services: FakeServices, **params: object) -> MediaCache:
    made = MediaCache("mm-embeddings-cache-producer", msgspec.convert(params, MediaCache.Params))
    made.start(services)
    return made


def showing(*prompts: str) -> Request:
    """A request with these images in its prompts, one letter per image."""
    r = request()
    r[TOKENS] = TokenizedPrompt([PromptTokens(None, [Feature("image", image, 0, 1) for image in prompt]) for prompt in prompts])
    return r


def sent(plugin: MediaCache, r: Request, *targets: int) -> None:
    c = candidates(count=3)
    run = ProfileRun(c, np.zeros(3), targets)
    plugin.before_send(r, Decision(run.targets, {"default": run}, "default"))


def matched(plugin: MediaCache, r: Request, c: Candidates | None = None) -> MediaMatch:
    plugin.produce(r, c or candidates(count=3))
    return r[MATCH]


def test_every_worker_finds_where_an_image_was_sent() -> None:
    shared = FakeServices()
    one, other = producer(shared), producer(shared)
    first = showing("ab")
    assert matched(one, first).held is None
    sent(one, first, 1)
    again = matched(other, showing("bc", "a"))
    assert again.held.tolist() == [0.0, 2.0, 0.0] and again.total == 3


def test_requests_with_another_salt_find_nothing() -> None:
    plugin = producer(FakeServices())
    salted = showing("ab")
    salted[TOKENS].cache_salt = "acme"
    matched(plugin, salted)
    sent(plugin, salted, 1)
    assert matched(plugin, salted).held is not None
    other = showing("ab")
    other[TOKENS].cache_salt = "bee"
    assert matched(plugin, other).held is None and matched(plugin, showing("ab")).held is None


def test_a_repeated_image_counts_once_and_an_image_without_a_hash_never() -> None:
    assert matched(producer(FakeServices()), showing("aa", "a")).total == 1
    nothing = request()
    nothing[TOKENS] = TokenizedPrompt([PromptTokens(None, [Feature("image", "", 0, 1)])])
    assert matched(producer(FakeServices()), nothing) is NO_MEDIA


def test_unknown_modalities_are_counted_under_one_label() -> None:
    services = FakeServices()
    plugin, r = producer(services), request()
    r[TOKENS] = TokenizedPrompt([PromptTokens(None, [Feature(f"m{n}", f"{n}", n, 1) for n in range(9)])])
    for _ in range(2):
        matched(plugin, r)
        sent(plugin, r, 1)
    assert services.counted["encoder_cache_queries_total"].values == {("other",): 18}
    assert services.counted["encoder_cache_hits_total"].values == {("pod-1", "other"): 9}


def test_an_item_counts_as_one_block_of_its_endpoint() -> None:
    services = FakeServices()
    plugin, r = producer(services), showing("abcdefghijklmnopqrstuvwxyz")
    matched(plugin, r)
    sent(plugin, r, 1)
    assert len(services.held) == 26 and not any(learned & WIDE for learned in services.held)


def test_a_request_without_media_has_no_match_and_adds_nothing() -> None:
    services = FakeServices()
    plugin, r = producer(services), request()
    assert matched(plugin, r) is NO_MEDIA
    assert scores(r, candidates(count=3)) is None
    sent(plugin, r, 0)
    assert services.held == {}


def test_all_targets_are_learned_and_hits_are_counted_for_the_first_one() -> None:
    services = FakeServices()
    plugin = producer(services)
    first = showing("ab")
    matched(plugin, first)
    sent(plugin, first, 1, 0)
    second = showing("abc")
    assert matched(plugin, second).held.tolist() == [2.0, 2.0, 0.0]
    sent(plugin, second, 0)
    assert services.counted["encoder_cache_queries_total"].values == {("image",): 5}
    assert services.counted["encoder_cache_hits_total"].values == {("pod-0", "image"): 2}
    assert services.measured["encoder_cache_hit_ratio"].values == [0.0, 2 / 3]


def test_an_owner_without_an_endpoint_is_ignored() -> None:
    services = FakeServices()
    plugin, first = producer(services), showing("a")
    matched(plugin, first)
    sent(plugin, first, 2)
    assert matched(plugin, showing("a"), candidates(count=2)).held is None


def test_a_bounded_number_of_items_is_looked_up(monkeypatch) -> None:
    monkeypatch.setattr(media_cache, "ITEMS_MAX", 2)
    assert matched(producer(FakeServices()), showing("abc")).total == 2


def scores(r: Request, c: Candidates, **params: str) -> list[float] | None:
    result = MediaCacheScorer("s", msgspec.convert(params, MediaCacheScorer.Params)).score(r, c, PROFILE)
    return None if result is None else result.tolist()


def test_the_score_is_the_share_of_items_that_an_endpoint_holds() -> None:
    r, c = request(), candidates(count=3)
    assert scores(r, c) is None
    r[MATCH] = MediaMatch(None, 4)
    assert scores(r, c) is None
    r[MATCH] = MediaMatch(np.array([0.0, 1.0, 4.0]), 4)
    assert scores(r, c) == [0.0, 0.25, 1.0]
    assert scores(r, c.keep(np.array([True, False, True]))) == [0.0, 1.0]
    assert scores(r, c, producerName="other") is None
