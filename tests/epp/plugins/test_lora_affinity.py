"""`lora-affinity-scorer`: adapter loaded 1, room 0.8, queued 0.6, else 0."""

import numpy as np

from epp.candidates import Candidates
from epp.data import ACTIVE_MODELS, WAITING_MODELS
from epp.plugin import NoParams
from epp.plugins.scorers.lora_affinity import MODELS_MAX, LoraAffinity
from tests.epp.plugins.calls import PROFILE
from tests.fakes import candidates, request

NAN = float("nan")


def scorer() -> LoraAffinity:
    return LoraAffinity("lora", NoParams())


def pool(limits: list[float]) -> Candidates:
    names = {
        ACTIVE_MODELS.name: [frozenset({"a"}), frozenset({"b"}), frozenset({"b", "c"}), frozenset()],
        WAITING_MODELS.name: [frozenset(), frozenset(), frozenset({"a"}), frozenset()],
    }
    return candidates({"max_lora": limits}, names=names)


def test_each_case_of_the_formula() -> None:
    # pod-0 has it active; pod-1 uses 1 of 2 places; pod-2 is full and `a` waits there; pod-3 does not report max_lora.
    c = pool([2, 2, 2, NAN])
    assert scorer().score(request(target_model="a"), c, PROFILE).tolist() == [1.0, 0.8, 0.6, 0.0]
    assert scorer().score(request(target_model="z"), c, PROFILE).tolist() == [0.8, 0.8, 0.0, 0.0]


def test_an_adapter_that_runs_and_is_waited_for_takes_one_place() -> None:
    """vLLM reports the same set as running and as waiting."""
    both = [frozenset({"b", "c"}), frozenset({"b", "c", "d"})]
    c = candidates({"max_lora": [3, 3]}, names={ACTIVE_MODELS.name: both, WAITING_MODELS.name: both})
    assert scorer().score(request(target_model="a"), c, PROFILE).tolist() == [0.8, 0.0]


def test_scores_follow_scrapes_and_candidates() -> None:
    lora, r = scorer(), request(target_model="a")
    first, second = pool([2, 2, 2, 2]), pool([1, 1, 2, 0])
    assert lora.score(r, first, PROFILE).tolist() == [1.0, 0.8, 0.6, 0.8]
    assert lora.score(r, second, PROFILE).tolist() == [1.0, 0.0, 0.6, 0.0]
    cut = second.keep(np.array([False, True, True, False]))
    assert lora.score(r, cut, PROFILE).tolist() == [0.0, 0.6]


def test_the_cache_of_scores_is_bounded_for_any_number_of_models() -> None:
    lora, c = scorer(), pool([2, 2, 2, 2])
    for number in range(3 * MODELS_MAX):
        lora.score(request(target_model=str(number)), c, PROFILE)
    assert len(lora._scores) <= MODELS_MAX
