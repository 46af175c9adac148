"""An attacker cannot tell which of two requests another tenant has sent (`tests.attacker`). `make bench-attack` tries it 10,000 times."""

import random
from collections import Counter

import pytest

from epp.request.tenants import Salts
from tests.attacker import ATTACKER, KINDS, SESSION, VICTIM, Client, attack, guessed, interval, picker, plan

TRIES = 204
KNOWN = 0.7  # of the guesses are right, at least, if nothing keeps tenants apart: an attacker that sends first sees less
CHANCE = 0.62  # 0.5 and 3.4 standard deviations of TRIES guesses


def rate(name: str, salts: Salts | None, attacker: str = ATTACKER) -> float:
    return attack(picker(KINDS[name], salts), KINDS[name], TRIES, attacker) / TRIES


@pytest.mark.parametrize("name", KINDS)
def test_what_a_tenant_has_sent_stays_unknown_to_others_but_not_to_itself(name: str) -> None:
    assert rate(name, Salts(7), VICTIM) > KNOWN  # the attack works
    assert 1 - CHANCE < rate(name, Salts(7)) < CHANCE


@pytest.mark.parametrize("name", sorted({*KINDS} - {SESSION}))
def test_without_salts_tenants_see_what_others_have_sent(name: str) -> None:
    assert rate(name, None) > KNOWN


def test_sessions_need_no_salt_to_be_apart() -> None:
    assert 1 - CHANCE < rate(SESSION, None) < CHANCE


def test_tenants_of_one_group_do_not_hide_what_they_have_sent() -> None:
    assert rate("prefix", Salts(7, {VICTIM: "company", ATTACKER: "company"})) > KNOWN


def test_the_attacker_learns_nothing_from_tries_that_look_alike_and_all_from_one_that_tells() -> None:
    planned = plan(TRIES, random.Random(3))
    assert Counter(planned[: TRIES // 2]) == Counter(planned[TRIES // 2 :]) and len({*Counter(planned).values()}) == 1
    assert guessed([({"when": when}, secret) for when, secret in planned]) == TRIES / 2
    assert guessed([({"when": when, "tells": f"{secret}"}, secret) for when, secret in planned]) == TRIES


@pytest.mark.parametrize("name", KINDS)
def test_answers_to_two_new_requests_look_alike_to_the_attacker(name: str) -> None:
    client = Client(picker(KINDS[name], Salts(7)), ATTACKER)
    one, other = (client.send(KINDS[name].message(1, secret)).answer for secret in range(2))
    assert one == other


def test_the_interval_of_a_rate_narrows_with_the_tries() -> None:
    low, high = interval(5000, 10_000)
    assert 0.49 < low < 0.4903 and 0.5097 < high < 0.51
    assert interval(50, 100)[1] - interval(50, 100)[0] > 9 * (high - low)
