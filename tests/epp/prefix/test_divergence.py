"""Long divergences of predicted and reported cached tokens, and what is said of their cause."""

from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.prefix.divergence import CHECKED_MIN, SAY_AGAIN_S, SLICE_S, SLICES, Sums, Watch, total

Shares = Mapping[str, tuple[float, float]]  # by endpoint: predicted, reported, of the prompt tokens


class World:
    """A watch, its clock, and servers that answer `rate` requests of 1,000 tokens each in a slice."""

    def __init__(self, rate: int = 20) -> None:
        self.watch = Watch()
        self.now = 1000.0
        self.rate = rate
        self.totals: dict[tuple[str, ...], Sums] = {}
        self.evictions = 0
        self.warnings = self.close()

    def close(self) -> list[str]:
        return self.watch.close(self.now, dict(self.totals), self.evictions)

    def slice(self, shares: Shares, *, kv: Mapping[str, float] | None = None, evictions: int = 0) -> list[str]:
        """One slice in which servers predicted and reported these shares."""
        for name, (predicted, reported) in shares.items():
            tokens = self.rate * 1000
            new = Sums(self.rate, tokens, int(predicted * tokens), int(reported * tokens))
            self.totals[key(name)] = total([self.totals.get(key(name), Sums()), new])
        self.evictions += evictions
        self.now += SLICE_S / 2
        assert not self.watch.saw(self.now, {})
        self.now += SLICE_S / 2
        assert self.watch.saw(self.now, {key(name): share for name, share in (kv or {}).items()})
        return self.close()

    def slices(self, shares: Shares, count: int = SLICES, **more: object) -> list[str]:
        """So many alike; all that was said."""
        return [text for _ in range(count) for text in self.slice(shares, **more)]  # type: ignore[arg-type]


def key(name: str) -> tuple[str, ...]:
    return (name, "default", "8000")


def test_predictions_that_hold_are_not_mentioned() -> None:
    assert World().slices({"a": (0.6, 0.5), "b": (0.1, 0.3)}, 20) == []


def test_it_is_said_once_when_the_whole_window_diverged() -> None:
    world = World()
    assert world.slices({"a": (0.8, 0.0), "b": (0.8, 0.0)}, SLICES - 1) == []
    (text,) = world.slice({"a": (0.8, 0.0), "b": (0.8, 0.0)})
    assert text.startswith(
        "prefix caches are not what they are taken for: over 5 minutes 80% of the prompt tokens of 200 requests were predicted to "
        "be cached and 0% reported, at a, b; likely cause: they report next to none, so their prefix cache is off"
    )
    assert world.slices({"a": (0.8, 0.0), "b": (0.8, 0.0)}, 10) == []


def silent(world: World, missed: int, *names: str) -> list[str]:
    """One slice of servers that report nothing, where so many hits were predicted."""
    for name in names:
        world.totals[key(name)] = total([world.totals.get(key(name), Sums()), Sums(missed=missed)])
    return world.slice({})


def test_servers_that_never_report_though_much_was_predicted_are_named_once() -> None:
    world = World()
    said = [text for _ in range(3 * SLICES) for text in silent(world, CHECKED_MIN // SLICES, "a", "b")]
    assert said == [
        "prefix caches are not what they are taken for: over 5 minutes 100 requests were predicted to find more than 25% of their "
        "prompt tokens cached and none was reported, at a, b; likely cause: they have never reported any, so their prefix cache is off, "
        "or they do not say what it gave (vLLM needs --enable-prompt-tokens-details)"
    ]


def test_of_servers_that_never_report_few_or_rare_predicted_hits_prove_nothing() -> None:
    world = World()
    for turn in range(4 * SLICES):
        assert silent(world, CHECKED_MIN // SLICES - 1, "a") == []
        assert silent(world, 0 if turn % 4 == 0 else CHECKED_MIN, "b") == []


def test_the_same_cause_is_said_again_after_an_hour() -> None:
    world = World()
    count = int(SAY_AGAIN_S / SLICE_S)
    assert len(world.slices({"a": (0.8, 0.0)}, SLICES + count - 1)) == 1
    assert len(world.slices({"a": (0.8, 0.0)}, 1)) == 1


def test_one_good_slice_within_the_window_keeps_it_silent() -> None:
    world = World()
    for _ in range(4):
        assert world.slices({"a": (0.8, 0.1)}, SLICES - 1) == []
        assert world.slice({"a": (0.5, 0.5)}) == []


def test_a_divergence_that_changes_sides_is_none() -> None:
    world = World()
    for _ in range(6):
        assert world.slice({"a": (0.8, 0.1)}) == []
        assert world.slice({"a": (0.1, 0.8)}) == []


def test_a_slice_without_requests_keeps_it_silent() -> None:
    world = World(rate=CHECKED_MIN)
    for _ in range(4):
        assert world.slices({"a": (0.8, 0.0)}, SLICES - 1) == []
        assert world.slice({}) == []


def test_too_few_requests_prove_nothing() -> None:
    assert World(rate=CHECKED_MIN // SLICES - 1).slices({"a": (0.8, 0.0)}, 20) == []


def test_servers_with_few_requests_are_judged_together() -> None:
    (text,) = World(rate=CHECKED_MIN // SLICES - 1).slices({"a": (0.8, 0.0), "b": (0.9, 0.0)})
    assert "at a, b; likely cause" in text


def test_a_single_server_is_found_among_others_that_are_as_predicted() -> None:
    (text,) = World().slices({"a": (0.8, 0.8), "b": (0.8, 0.0), "c": (0.8, 0.75)})
    assert "of 100 requests" in text
    assert ", at b; likely cause" in text


def test_of_many_servers_the_first_are_named_and_the_others_counted() -> None:
    (text,) = World().slices({f"pod-{i}": (0.8, 0.0) for i in range(9)})
    assert "at pod-0, pod-1, pod-2, pod-3, pod-4 and 4 more;" in text


def drift(world: World) -> list[str]:
    return [text for reported in (0.1, 0.3, 0.5, 0.2, 0.4) for text in world.slice({"a": (0.9, reported)})]


@pytest.mark.parametrize(
    ("slices", "said"),
    [
        (
            lambda w: w.slices({"a": (0.8, 0.0)}),
            "their prefix cache is off, or they hash with a cache salt, model or adapter",
        ),
        (lambda w: w.slices({"a": (0.8, 0.01)}), "their prefix cache is off"),
        (lambda w: w.slices({"a": (0.8, 0.0)}, kv={"a": 1.0}), "their prefix cache is off"),
        (lambda w: w.slices({"a": (0.8, 0.01)}, kv={"a": 0.98}), "their KV caches are 98% full"),
        (lambda w: w.slices({"a": (0.8, 0.4)}, kv={"a": 0.95}), "their KV caches are 95% full"),
        (lambda w: w.slices({"a": (0.8, 0.4)}, kv={"a": 0.5}), "reported is a steady 50% of predicted"),
        (lambda w: w.slices({"a": (0.8, 0.4)}, evictions=100), "reported is a steady 50% of predicted"),
        (drift, "it changes from minute to minute"),
        (drift, "their caches take less than the picker thinks (lruCapacityPerServer"),
        (lambda w: w.slices({"a": (0.1, 0.7)}, evictions=100), "the picker's index let go of 500 entries meanwhile"),
        (lambda w: w.slices({"a": (0.1, 0.7)}), "requests reach them past this picker"),
    ],
)
def test_the_likeliest_cause_is_named_by_what_else_is_known(
    slices: Callable[[World], Sequence[str]], said: str
) -> None:
    (text,) = slices(World())
    assert said in text


def test_different_causes_are_different_warnings() -> None:
    first, second = World().slices({"a": (0.8, 0.0), "b": (0.8, 0.4), "c": (0.8, 0.8)})
    assert "at a; likely cause: they report next to none" in first
    assert "at b; likely cause: reported is a steady 50%" in second


def test_what_was_counted_before_the_watch_began_does_not_count() -> None:
    world = World()
    world.watch = Watch()
    world.totals[key("a")] = Sums(1000, 1_000_000, 1_000_000, 0)
    world.close()
    assert world.slices({"a": (0.8, 0.8)}, 20) == []


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.tuples(st.floats(0, 1), st.floats(0, 1))), max_size=12))
def test_no_window_says_more_than_one_warning_for_a_cause(history: list[Shares]) -> None:
    world = World()
    said = [text.partition("likely cause: ")[2].split()[:3] for shares in history for text in world.slice(shares)]
    assert len({tuple(words) for words in said}) == len(said)
