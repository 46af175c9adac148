"""Which rule counts for a model, and which of its targets is drawn."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.model_rewrite import WEIGHT_MAX, Choice, Rewrite, Rule, Rules, Target, compiled

MODELS = ("a", "b", "c")


def rule(*targets: str | tuple[str, int], models: tuple[str, ...] | None = None) -> Rule:
    return Rule(models, tuple(Target(t) if isinstance(t, str) else Target(*t) for t in targets))


def rewrite(name: str, *rules: Rule, created: float | None = None) -> Rewrite:
    return Rewrite(name, created, rules)


def choice(rules: Rules, model: str) -> Choice | None:
    return rules.by_model().get(model, rules.others())


def target(rules: Rules, model: str, drawn: float = 0.0) -> str | None:
    found = choice(rules, model)
    return None if found is None else found.pick(lambda: drawn)


def test_without_rules_no_model_has_a_choice() -> None:
    assert compiled([]) == Rules()
    assert choice(Rules(), "a") is None


def test_a_rule_that_names_the_model_goes_before_an_older_one_for_every_model() -> None:
    rules = compiled([rewrite("old", rule("x")), rewrite("new", rule("y", models=("a",)), created=5.0)])
    assert (target(rules, "a"), target(rules, "b")) == ("y", "x")


def test_the_oldest_object_counts_and_one_without_an_age_is_older_than_all() -> None:
    given_ = [
        rewrite(n, rule(n, models=("a",)), created=at) for n, at in (("late", 2.0), ("early", 1.0), ("first", None))
    ]
    assert target(compiled(given_), "a") == "first"
    assert target(compiled(given_[:2]), "a") == "early"


def test_objects_of_one_age_count_in_the_order_in_which_they_are_given() -> None:
    one, two = (rewrite(name, rule(name), created=1.0) for name in ("one", "two"))
    assert target(compiled([one, two]), "a") == "one"
    assert target(compiled([two, one]), "a") == "two"


def test_within_an_object_the_first_rule_counts() -> None:
    rules = compiled(
        [rewrite("r", rule("x", models=("a", "b")), rule("y", models=("b", "c")), rule("z"), rule("never"))]
    )
    assert [target(rules, model) for model in ("a", "b", "c", "other")] == ["x", "x", "y", "z"]


def test_a_rule_with_matches_that_name_no_model_never_applies() -> None:
    assert compiled([rewrite("r", rule("x", models=()))]) == Rules()


def test_a_model_that_is_not_named_at_all_has_the_choice_for_every_model() -> None:
    assert target(compiled([rewrite("r", rule("x"))]), "") == "x"


def test_rules_that_others_hide_are_not_kept() -> None:
    rules = compiled([rewrite("r", rule("x", models=("a",)), rule("y", models=("a",)), rule("z"), rule("w"))])
    assert [c.models for c in rules.choices] == [("x",), ("z",)]
    assert sorted(set(rules.names())) == ["a", "x", "z"]


def test_the_choice_knows_whose_rule_it_is() -> None:
    found = choice(compiled([rewrite("r", rule("x"))]), "a")
    assert found is not None and found.rewrite == "r"


def test_without_weights_each_target_has_the_same_share() -> None:
    rules = compiled([rewrite("r", rule("x", "y", "z", "w"))])
    assert [target(rules, "a", drawn) for drawn in (0.0, 0.25, 0.5, 0.75, 0.9999)] == ["x", "y", "z", "w", "w"]


def test_where_one_target_has_a_weight_those_without_are_never_drawn() -> None:
    rules = compiled([rewrite("r", rule("x", ("y", 1), "z", ("w", 3)))])
    assert [target(rules, "a", drawn) for drawn in (0.0, 0.24, 0.25, 0.999)] == ["y", "y", "w", "w"]


def test_a_target_may_be_given_twice() -> None:
    rules = compiled([rewrite("r", rule(("x", 1), ("y", 2), ("x", 1)))])
    assert [target(rules, "a", drawn) for drawn in (0.0, 0.25, 0.74, 0.75)] == ["x", "y", "y", "x"]


@given(st.lists(st.integers(1, WEIGHT_MAX), min_size=1, max_size=64), st.floats(0.0, 1.0, exclude_max=True))
@settings(max_examples=200, deadline=None)
def test_whatever_is_drawn_the_target_is_the_one_at_that_place_of_the_weights(weights: list[int], drawn: float) -> None:
    rules = compiled([rewrite("r", rule(*((str(at), weight) for at, weight in enumerate(weights))))])
    at = int(target(rules, "a", drawn) or -1)
    place = drawn * sum(weights)
    assert sum(weights[:at]) <= place <= sum(weights[: at + 1])


@pytest.mark.parametrize("weights", [(1,), (1, 1), (90, 10), (1, 999), (5, 0, 5), (3, 3, 3, 1), (WEIGHT_MAX, 1)])
def test_shares_come_to_weight_over_the_sum_of_weights(weights: tuple[int, ...]) -> None:
    """0 stands for none. The bound is five standard deviations."""
    targets = [(str(at), weight) if weight else str(at) for at, weight in enumerate(weights)]
    found, rng, count = choice(compiled([rewrite("r", rule(*targets))]), "a"), random.Random(7), 20_000
    assert found is not None
    drawn = Counter(found.pick(rng.random) for _ in range(count))
    for at, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(drawn[str(at)] - share * count) <= 5 * (count * share * (1 - share)) ** 0.5


@given(st.lists(st.integers(1, 50), min_size=2, max_size=6), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_any_weights_are_met(weights: list[int], rng: random.Random) -> None:
    found, count = choice(compiled([rewrite("r", rule(*((str(n), w) for n, w in enumerate(weights))))]), "a"), 2_000
    assert found is not None
    seeded = random.Random(rng.getrandbits(32))
    drawn = Counter(found.pick(seeded.random) for _ in range(count))
    for at, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(drawn[str(at)] - share * count) <= 7 * (count * share * (1 - share)) ** 0.5 + 1


def oracle(rewrites: Sequence[Rewrite], model: str) -> tuple[str, ...]:
    """The names of the targets of the one rule that counts, found the slow way: all rules in order, twice."""
    places = [(r.created is not None, r.created or 0.0, at) for at, r in enumerate(rewrites)]
    ordered = [rewrites[place[2]] for place in sorted(places)]
    every = [(r, each) for r in ordered for each in r.rules]
    exact = [(r, each) for r, each in every if each.models is not None and model in each.models]
    generic = [(r, each) for r, each in every if each.models is None]
    for found, each in (*exact, *generic):
        return (found.name, *(t.model for t in each.targets))
    return ()


rules_ = st.builds(
    Rule,
    st.none() | st.lists(st.sampled_from(MODELS), max_size=3).map(tuple),
    st.lists(st.text("xyz", min_size=1, max_size=2).map(Target), min_size=1, max_size=3).map(tuple),
)
rewrites_ = st.builds(
    Rewrite,
    st.text("rs", max_size=3),
    st.none() | st.sampled_from([0.0, 1.0, 2.0]),
    st.lists(rules_, max_size=4).map(tuple),
)


@given(st.lists(rewrites_, max_size=6))
@settings(max_examples=300, deadline=None)
def test_the_rule_that_counts_is_the_one_found_by_looking_at_all_in_order(rewrites: list[Rewrite]) -> None:
    rules = compiled(rewrites)
    for model in (*MODELS, "other", ""):
        found = choice(rules, model)
        assert (() if found is None else (found.rewrite, *found.models)) == oracle(rewrites, model)
