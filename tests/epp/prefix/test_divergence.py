"""Long divergences of predicted and reported cached tokens, and the warnings about their cause."""

from collections.abc import Callable, Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from epp.prefix.divergence import CHECKED_MIN, SAY_AGAIN_S, SLICE_S, SLICES, Cause, Divergence, Sums, Watch, total
from tests.cases import cases

Shares = Mapping[str, tuple[float, float]]  # endpoint -> predicted and reported share of the prompt tokens


class World:
    """A watch, its clock, and servers that answer `rate` requests of 1,000 tokens each in a slice."""

    def __init__(self, rate: int = 20) -> None:
        self.watch = Watch()
        self.now = 1000.0
        self.rate = rate
        self.totals: dict[tuple[str, ...], Sums] = {}
        self.evictions = 0
        self.warnings = self.close()

    def close(self) -> list[Divergence]:
        return self.watch.close(self.now, dict(self.totals), self.evictions)

    def slice(self, shares: Shares, *, kv: Mapping[str, float] | None = None, evictions: int = 0) -> list[Divergence]:
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

    def slices(self, shares: Shares, count: int = SLICES, **more: object) -> list[Divergence]:
        """`count` equal slices; returns all warnings."""
        return [each for _ in range(count) for each in self.slice(shares, **more)]  # type: ignore[arg-type]


def key(name: str) -> tuple[str, ...]:
    return (name, "default", "8000")


def test_correct_predictions_cause_no_warning() -> None:
    assert World().slices({"a": (0.6, 0.5), "b": (0.1, 0.3)}, 20) == []


def test_a_divergence_is_reported_once_after_a_whole_window() -> None:
    world = World()
    assert world.slices({"a": (0.8, 0.0), "b": (0.8, 0.0)}, SLICES - 1) == []
    (warning,) = world.slice({"a": (0.8, 0.0), "b": (0.8, 0.0)})
    assert warning[:-1] == (5, 200, "80%", "0%", 2, ["a", "b"])
    assert warning.reason.startswith("they report almost no cached tokens, so their prefix cache is off")
    assert world.slices({"a": (0.8, 0.0), "b": (0.8, 0.0)}, 10) == []


def silent(world: World, missed: int, *names: str) -> list[Divergence]:
    """One slice with `missed` predicted hits at servers that report nothing."""
    for name in names:
        world.totals[key(name)] = total([world.totals.get(key(name), Sums()), Sums(missed=missed)])
    return world.slice({})


def test_servers_that_never_report_although_hits_were_predicted_are_named_once() -> None:
    world = World()
    warnings = [each for _ in range(3 * SLICES) for each in silent(world, CHECKED_MIN // SLICES, "a", "b")]
    assert warnings == [Divergence(5, 100, "more than 25%", "none", 2, ["a", "b"], Cause.NEVER_REPORTED.value)]
    assert "vLLM needs --enable-prompt-tokens-details" in warnings[0].reason


def test_few_or_rare_predicted_hits_at_servers_that_never_report_cause_no_warning() -> None:
    world = World()
    for turn in range(4 * SLICES):
        assert silent(world, CHECKED_MIN // SLICES - 1, "a") == []
        assert silent(world, 0 if turn % 4 == 0 else CHECKED_MIN, "b") == []


def test_the_same_cause_is_reported_again_after_an_hour() -> None:
    world = World()
    count = int(SAY_AGAIN_S / SLICE_S)
    assert len(world.slices({"a": (0.8, 0.0)}, SLICES + count - 1)) == 1
    assert len(world.slices({"a": (0.8, 0.0)}, 1)) == 1


def test_one_good_slice_within_the_window_prevents_the_warning() -> None:
    world = World()
    for _ in range(4):
        assert world.slices({"a": (0.8, 0.1)}, SLICES - 1) == []
        assert world.slice({"a": (0.5, 0.5)}) == []


def test_a_difference_that_changes_direction_is_no_divergence() -> None:
    world = World()
    for _ in range(6):
        assert world.slice({"a": (0.8, 0.1)}) == []
        assert world.slice({"a": (0.1, 0.8)}) == []


def test_a_slice_without_requests_prevents_the_warning() -> None:
    world = World(rate=CHECKED_MIN)
    for _ in range(4):
        assert world.slices({"a": (0.8, 0.0)}, SLICES - 1) == []
        assert world.slice({}) == []


def test_too_few_requests_cause_no_warning() -> None:
    assert World(rate=CHECKED_MIN // SLICES - 1).slices({"a": (0.8, 0.0)}, 20) == []


def test_servers_with_few_requests_are_judged_together() -> None:
    (warning,) = World(rate=CHECKED_MIN // SLICES - 1).slices({"a": (0.8, 0.0), "b": (0.9, 0.0)})
    assert warning.endpoints == ["a", "b"]


def test_a_single_diverging_server_is_found() -> None:
    (warning,) = World().slices({"a": (0.8, 0.8), "b": (0.8, 0.0), "c": (0.8, 0.75)})
    assert (warning.requests, warning.endpoints) == (100, ["b"])


def test_the_first_of_many_servers_are_named_and_the_others_counted() -> None:
    (warning,) = World().slices({f"pod-{i}": (0.8, 0.0) for i in range(9)})
    assert (warning.endpoints, warning.servers) == (["pod-0", "pod-1", "pod-2", "pod-3", "pod-4"], 9)


def drift(world: World) -> list[Divergence]:
    return [each for reported in (0.1, 0.3, 0.5, 0.2, 0.4) for each in world.slice({"a": (0.9, reported)})]


@cases(
    ("slices", "cause"),
    [
        (lambda w: w.slices({"a": (0.8, 0.0)}), "their prefix cache is off, or they hash with a cache salt, model or adapter"),
        (lambda w: w.slices({"a": (0.8, 0.01)}), "their prefix cache is off"),
        (lambda w: w.slices({"a": (0.8, 0.0)}, kv={"a": 1.0}), "their prefix cache is off"),
        (lambda w: w.slices({"a": (0.8, 0.01)}, kv={"a": 0.98}), "their KV caches are 98% full"),
        (lambda w: w.slices({"a": (0.8, 0.4)}, kv={"a": 0.95}), "their KV caches are 95% full"),
        (lambda w: w.slices({"a": (0.8, 0.4)}, kv={"a": 0.5}), "they report a steady 50% of the prediction"),
        (lambda w: w.slices({"a": (0.8, 0.4)}, evictions=100), "they report a steady 50% of the prediction"),
        (drift, "the reported share changes from minute to minute"),
        (drift, "their caches are smaller than the picker assumes (lruCapacityPerServer"),
        (lambda w: w.slices({"a": (0.1, 0.7)}, evictions=100), "the picker's index evicted 500 entries that the servers still held"),
        (lambda w: w.slices({"a": (0.1, 0.7)}), "requests reach the servers without this picker"),
    ],
)
def test_the_likely_cause_follows_from_other_figures(slices: Callable[[World], Sequence[Divergence]], cause: str) -> None:
    (warning,) = slices(World())
    assert cause in warning.reason


def test_different_causes_are_different_warnings() -> None:
    first, second = World().slices({"a": (0.8, 0.0), "b": (0.8, 0.4), "c": (0.8, 0.8)})
    assert first.endpoints == ["a"] and first.reason.startswith("they report almost no cached tokens")
    assert second.endpoints == ["b"] and second.reason.startswith("they report a steady 50%")


def test_requests_before_the_start_of_the_watch_do_not_count() -> None:
    world = World()
    world.watch = Watch()
    world.totals[key("a")] = Sums(1000, 1_000_000, 1_000_000, 0)
    world.close()
    assert world.slices({"a": (0.8, 0.8)}, 20) == []


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.tuples(st.floats(0, 1), st.floats(0, 1))), max_size=12))
def test_a_window_has_at_most_one_warning_per_cause(history: list[Shares]) -> None:
    world = World()
    warnings = [each.reason.split()[:3] for shares in history for each in world.slice(shares)]
    assert len({tuple(words) for words in warnings}) == len(warnings)
