"""Frames: patches lead from one state to the next, and idle endpoints are in none of them."""

import itertools
import json
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.workers.supervisor.pages.state.looks import endpoint, look
from workers.supervisor.pages.state.frames import FRAME_S, PATCHES_KEPT, Frames, Further, State, difference, plain
from workers.supervisor.pages.state.look import Look
from workers.supervisor.pages.state.state_pages import pieces

TEXT = st.text(max_size=4)
VALUES = st.recursive(
    st.integers() | st.booleans() | TEXT | st.lists(st.integers(), max_size=3),
    lambda children: st.dictionaries(TEXT, children, max_size=4),
    max_leaves=12,
)
STATES = st.dictionaries(TEXT, VALUES, max_size=6)


def merged(target: Any, patch: Any) -> Any:
    """MergePatch of RFC 7396, section 2."""
    if not isinstance(patch, dict):
        return patch
    target = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        else:
            target[name] = merged(target.get(name), value)
    return target


class World:
    """A source of looks at endpoints that the test sets, and a clock that moves while the frames wait."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.endpoints = [endpoint("a"), endpoint("b")]
        self.looks = 0
        self.names: tuple[str, ...] = ()
        self.seen = SimpleNamespace(name="epp", pid=7, ports={}, started_at=0.0)
        self.frames = Frames(self, lambda _: Further({"pool": "p"}, {}), lambda: self.now, lambda: self.now)  # type: ignore[arg-type]

    def pools(self) -> tuple[str, ...]:
        return self.names

    def looking(self, now: float) -> Generator[None, None, Look]:
        self.looks += 1
        endpoints = tuple(self.endpoints)
        yield
        return look(at=now, endpoints=endpoints)

    def until(self, number: int) -> State:
        """Steps until there is this frame."""
        for _ in range(10_000):
            if self.frames.number >= number:
                break
            self.now += self.frames.wait_s()
            self.frames.step()
        assert self.frames.state is not None
        return self.frames.state


def document(state: State) -> dict[str, Any]:
    return json.loads(b"".join(pieces(state)))


@given(STATES, STATES)
def test_a_patch_leads_from_one_state_to_the_next(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert merged(old, difference(old, new)) == new
    assert difference(new, new) == {}


def test_all_patches_applied_to_the_first_state_give_the_last_one() -> None:
    world = World()
    followed = document(world.until(1))
    world.endpoints = [endpoint("b", inflight_requests=3), endpoint("c")]
    last = document(world.until(3))
    for number in (2, 3):
        patch = world.frames.patch(number)
        assert patch is not None
        followed = merged(followed, json.loads(patch))
    del followed["number"], last["number"]
    assert followed == last
    assert sorted(name.split()[0] for name in last["endpoints"]) == ["default/b", "default/c"]


def test_an_endpoint_without_changes_is_in_no_patch() -> None:
    world = World()
    world.until(1)
    world.endpoints[1] = endpoint("b", inflight_requests=1)
    world.until(2)
    patch = json.loads(world.frames.patch(2) or b"{}")
    assert [name.split()[0] for name in patch["endpoints"]] == ["default/b"]
    assert patch["endpoints"]["default/b 10.0.0.1:8000"]["in_flight"] == 1


def test_a_frame_is_made_once_per_second_and_old_patches_are_forgotten() -> None:
    world = World()
    world.until(1)
    before = world.now
    world.until(9)
    assert 7 * FRAME_S <= world.now - before <= 9 * FRAME_S
    assert [world.frames.patch(number) is not None for number in range(2, 10)] == [False] * 3 + [True] * PATCHES_KEPT


def test_the_first_frame_has_rates_from_two_looks_shortly_after_each_other() -> None:
    world = World()
    state = world.until(1)
    assert world.looks == 2
    assert state.values["requests"]["per_s"] == 0.0


def test_a_large_state_is_made_in_short_steps_and_sent_in_pieces() -> None:
    world = World()
    world.endpoints = [endpoint(f"e-{number:04}") for number in range(1000)]
    world.until(1)
    steps = itertools.count()
    while world.frames.number < 2:
        world.now += world.frames.wait_s()
        world.frames.step()
        next(steps)
    assert next(steps) > 20
    sent = list(pieces(world.until(2)))
    assert max(map(len, sent)) < 64 << 10
    assert not any(b"\n" in piece for piece in sent)
    assert len(json.loads(b"".join(sent))["endpoints"]) == 1000


def test_unknown_values_are_left_out_ages_are_whole_and_numbers_are_short() -> None:
    values = {"a": None, "age_s": 1.9, "share": 0.123456, "inner": {"b": None, "c": 123456.7}, "list": [{"d": None}]}
    assert plain(values) == {"age_s": 1, "share": 0.1235, "inner": {"c": 123457}, "list": [{}]}
    assert plain({"x": float("inf"), "y": float("nan")}) == {"x": 0, "y": 0}


def test_the_state_of_a_picker_with_places_has_pools_before_it_has_found_one() -> None:
    world = World()
    assert "pools" not in document(world.until(1))
    world.names = ("", "")
    assert document(world.until(2))["pools"] == {}
