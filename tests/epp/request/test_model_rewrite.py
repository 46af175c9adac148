"""Model rewrites: which rule applies to a model, and which of its targets is drawn."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.request.model_rewrite import WEIGHT_MAX, Rewrite, Rule, Rules, Target, compiled
from tests.examples import examples

MODELS = ("a", "b", "c")


def rule(*targets: str | tuple[str, int], models: tuple[str, ...] | None = None) -> Rule:
    return Rule(models, tuple(Target(t) if isinstance(t, str) else Target(*t) for t in targets))


def rewrite(name: str, *rules: Rule, created: float | None = None) -> Rewrite:
    return Rewrite(name, created, rules)


def target(rules: Rules, model: str, drawn: float = 0.0) -> str | None:
    return rules.target(model, lambda: drawn)


def test_without_rules_no_model_has_a_choice() -> None:
    assert compiled([]) == Rules()
    assert Rules().choice("a") is None


def test_a_rule_that_names_the_model_precedes_an_older_rule_for_every_model() -> None:
    rules = compiled([rewrite("old", rule("x")), rewrite("new", rule("y", models=("a",)), created=5.0)])
    assert (target(rules, "a"), target(rules, "b")) == ("y", "x")


def test_the_oldest_object_applies_and_one_without_an_age_is_the_oldest() -> None:
    objects = [rewrite(n, rule(n, models=("a",)), created=at) for n, at in (("late", 2.0), ("early", 1.0), ("first", None))]
    assert target(compiled(objects), "a") == "first"
    assert target(compiled(objects[:2]), "a") == "early"


def test_objects_of_equal_age_apply_in_their_order() -> None:
    one, two = (rewrite(name, rule(name), created=1.0) for name in ("one", "two"))
    assert target(compiled([one, two]), "a") == "one"
    assert target(compiled([two, one]), "a") == "two"


def test_the_first_rule_of_an_object_applies() -> None:
    rules = compiled([rewrite("r", rule("x", models=("a", "b")), rule("y", models=("b", "c")), rule("z"), rule("never"))])
    assert [target(rules, model) for model in ("a", "b", "c", "other")] == ["x", "x", "y", "z"]


def test_a_rule_with_an_empty_list_of_models_never_applies() -> None:
    assert compiled([rewrite("r", rule("x", models=()))]) == Rules()


def test_an_empty_model_name_gets_the_choice_for_every_model() -> None:
    assert target(compiled([rewrite("r", rule("x"))]), "") == "x"


def test_rules_that_can_never_apply_are_dropped() -> None:
    rules = compiled([rewrite("r", rule("x", models=("a",)), rule("y", models=("a",)), rule("z"), rule("w"))])
    assert [c.models for c in rules.choices] == [("x",), ("z",)]
    assert sorted(set(rules.names())) == ["a", "x", "z"]


def test_a_choice_has_the_name_of_its_object() -> None:
    chosen = compiled([rewrite("r", rule("x"))]).choice("a")
    assert chosen is not None and chosen.rewrite == "r"


def test_without_weights_each_target_has_the_same_share() -> None:
    rules = compiled([rewrite("r", rule("x", "y", "z", "w"))])
    assert [target(rules, "a", drawn) for drawn in (0.0, 0.25, 0.5, 0.75, 0.9999)] == ["x", "y", "z", "w", "w"]


def test_if_a_target_has_a_weight_targets_without_are_never_drawn() -> None:
    rules = compiled([rewrite("r", rule("x", ("y", 1), "z", ("w", 3)))])
    assert [target(rules, "a", drawn) for drawn in (0.0, 0.24, 0.25, 0.999)] == ["y", "y", "w", "w"]


def test_a_target_may_be_listed_twice() -> None:
    rules = compiled([rewrite("r", rule(("x", 1), ("y", 2), ("x", 1)))])
    assert [target(rules, "a", drawn) for drawn in (0.0, 0.25, 0.74, 0.75)] == ["x", "y", "y", "x"]


@given(st.lists(st.integers(1, WEIGHT_MAX), min_size=1, max_size=64), st.floats(0.0, 1.0, exclude_max=True))
@examples(200)
def test_the_drawn_number_selects_the_target_by_cumulative_weight(weights: list[int], drawn: float) -> None:
    rules = compiled([rewrite("r", rule(*((str(at), weight) for at, weight in enumerate(weights))))])
    at = int(target(rules, "a", drawn) or -1)
    position = drawn * sum(weights)
    assert sum(weights[:at]) <= position <= sum(weights[: at + 1])


@pytest.mark.parametrize("weights", [(1,), (1, 1), (90, 10), (1, 999), (5, 0, 5), (3, 3, 3, 1), (WEIGHT_MAX, 1)])
def test_the_share_of_a_target_is_its_weight_over_the_sum(weights: tuple[int, ...]) -> None:
    """Weight 0 stands for no weight. The bound is five standard deviations."""
    targets = [(str(at), weight) if weight else str(at) for at, weight in enumerate(weights)]
    chosen, rng, count = compiled([rewrite("r", rule(*targets))]).choice("a"), random.Random(7), 20_000
    assert chosen is not None
    drawn = Counter(chosen.pick(rng.random) for _ in range(count))
    for at, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(drawn[str(at)] - share * count) <= 5 * (count * share * (1 - share)) ** 0.5


@given(st.lists(st.integers(1, 50), min_size=2, max_size=6), st.randoms(use_true_random=False))
@examples(40)
def test_shares_follow_any_weights(weights: list[int], rng: random.Random) -> None:
    chosen, count = compiled([rewrite("r", rule(*((str(n), w) for n, w in enumerate(weights))))]).choice("a"), 2_000
    assert chosen is not None
    seeded = random.Random(rng.getrandbits(32))
    drawn = Counter(chosen.pick(seeded.random) for _ in range(count))
    for at, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(drawn[str(at)] - share * count) <= 7 * (count * share * (1 - share)) ** 0.5 + 1


def oracle(rewrites: Sequence[Rewrite], model: str) -> tuple[str, ...]:
    """The object's name and the targets of the rule that applies, by brute force: all rules in order, twice."""
    ages = [(r.created is not None, r.created or 0.0, at) for at, r in enumerate(rewrites)]
    ordered = [rewrites[age[2]] for age in sorted(ages)]
    every = [(r, each) for r in ordered for each in r.rules]
    exact = [(r, each) for r, each in every if each.models is not None and model in each.models]
    generic = [(r, each) for r, each in every if each.models is None]
    for source, each in (*exact, *generic):
        return (source.name, *(t.model for t in each.targets))
    return ()


rules_ = st.builds(
    Rule,
    st.none() | st.lists(st.sampled_from(MODELS), max_size=3).map(tuple),
    st.lists(st.text("xyz", min_size=1, max_size=2).map(Target), min_size=1, max_size=3).map(tuple),
)
rewrites_ = st.builds(
    Rewrite, st.text("rs", max_size=3), st.none() | st.sampled_from([0.0, 1.0, 2.0]), st.lists(rules_, max_size=4).map(tuple)
)


@given(st.lists(rewrites_, max_size=6))
@examples(300)
def test_compiled_rules_agree_with_a_search_of_all_rules_in_order(rewrites: list[Rewrite]) -> None:
    rules = compiled(rewrites)
    for model in (*MODELS, "other", ""):
        chosen = rules.choice(model)
        assert (() if chosen is None else (chosen.rewrite, *chosen.models)) == oracle(rewrites, model)
