"""The view on terminals of all sizes."""

import io
import re

import msgspec
import pytest
from rich.console import Console

from epp.prefix.divergence import Sums
from shm.table import DOWN, State
from tests.workers.supervisor.pages.state.looks import INSTANCE, area, endpoint, look, of
from workers.cli.top.view import screen
from workers.supervisor.pages.kv_events import StreamFigures
from workers.supervisor.pages.state.figures import Figures, figures
from workers.supervisor.pages.state.look import BandLook, Others

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def printed(shown: Figures, width: int, height: int | None = None, *, terminal: bool = False) -> str:
    console = Console(
        file=io.StringIO(),
        width=width,
        height=height or 25,
        force_terminal=terminal,
        color_system="standard" if terminal else None,
        highlight=False,
    )
    console.print(screen(shown, width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def with_endpoints(count: int, workers: int = 2) -> Figures:
    endpoints = [
        endpoint(f"model-server-{n:03}", inflight_requests=n, inflight_tokens=n * 1000, picks=n * 10, index_entries=n * 999)
        for n in range(count)
    ]
    areas = [area() for _ in range(1 + workers)]
    return of(look(at=102.0, areas=areas, endpoints=endpoints), look(areas=areas, endpoints=[endpoint(e.name) for e in endpoints]))


@pytest.mark.parametrize("height", [None, 10, 24, 60])
@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("count", [0, 3, 500])
def test_any_number_of_endpoints_fits_any_terminal(count: int, width: int, height: int | None) -> None:
    lines = printed(with_endpoints(count), width, height).splitlines()
    assert max(map(len, lines)) <= width
    if height is not None and height >= 24:
        assert len(lines) <= height


def test_without_endpoints_a_line_says_so() -> None:
    assert printed(with_endpoints(0), 80).splitlines()[-1] == "no endpoints"


def test_endpoints_are_in_the_order_of_their_names_if_all_fit() -> None:
    lines = printed(with_endpoints(3), 80, 24).splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["model-server-000", "model-server-001", "model-server-002"]


def test_the_busiest_rows_are_shown_and_the_others_counted_if_not_all_fit() -> None:
    lines = printed(with_endpoints(500), 80, 24).splitlines()
    shown = [line.split()[0] for line in lines if line.startswith("model-server-")]
    assert shown == [f"model-server-{n}" for n in range(499, 499 - len(shown), -1)]
    assert lines[-1] == f"… and {500 - len(shown)} more endpoints"


def test_many_workers_leave_room_for_endpoints() -> None:
    text = printed(with_endpoints(500, workers=64), 80, 24)
    assert "more workers" in text
    assert "model-server-499" in text


def test_without_a_height_all_rows_are_shown() -> None:
    text = printed(with_endpoints(500, workers=64), 80)
    assert text.count("model-server-") == 500
    assert "more" not in text


def test_numbers_are_shown_completely_or_not_at_all() -> None:
    shown = of(look(endpoints=[endpoint("a", inflight_tokens=123_456)]), look(at=99.0, endpoints=[endpoint("a")]))
    for width in range(40, 200, 10):
        table = printed(shown, width).split("\n\n")[1:]
        assert "…" not in "".join(table), width


def test_a_wide_terminal_shows_all_columns() -> None:
    text = printed(with_endpoints(1), 200)
    columns = ("address", "state", "age", "waiting", "running", "KV", "in fl.", "tokens", "picks/s", "share", "blocks")
    assert all(column in text for column in columns)
    assert "10.0.0.1:8000" in text


def test_a_removed_worker_is_not_missing() -> None:
    text = printed(of(look(areas=(area(), area(), area(serving=False, gauges={"leaving": 2})))), 120)
    assert "1 of 1 workers serving" in text
    assert "removed" in text


def test_an_address_is_never_cut_or_divided() -> None:
    address = "[2001:db8:1234:5678:9abc:def0:1234:5678]:8000"
    for width in (60, 120):
        assert address in printed(of(look(endpoints=[endpoint("a", address=address)])), width)


def test_a_column_that_no_endpoint_reports_is_not_shown() -> None:
    text = printed(of(look(endpoints=[endpoint("a", scraped={"waiting_requests": 1.0})])), 200)
    assert "running" not in text
    assert "waiting" in text


def test_the_predicted_and_the_reported_share_of_cached_tokens_are_shown() -> None:
    compared = endpoint("a", cached=Sums(requests=2, prompt=100, predicted=80, reported=60))
    text = printed(of(look(endpoints=[compared, endpoint("b")])), 200)
    assert "predicted 80%, reported 60%" in text
    titles, first, second = text.splitlines()[-3:]
    assert "predicted" in titles and "cached" in titles
    assert ("80%" in first, "60%" in first, "–" in second) == (True, True, True)
    assert "predicted" not in printed(of(look(endpoints=[endpoint("b")])), 200)


def test_names_cannot_send_control_sequences_to_the_terminal() -> None:
    text = printed(of(look(endpoints=[endpoint("\x1b[2J[red]c")])), 120, terminal=True)
    assert "\x1b[2J" not in text
    assert "\\u001b[2J[red]c" in ESCAPE.sub("", text)


def test_problems_are_coloured_on_a_terminal_and_also_shown_as_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = of(look(endpoints=[endpoint("a", state=State.STALE, flags=DOWN)]))
    assert "\x1b[31mdown" in printed(shown, 80, terminal=True)
    assert "\x1b[" not in printed(shown, 80)
    assert "down" in printed(shown, 80)


def test_no_color_turns_colours_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = printed(of(look(endpoints=[endpoint("a", flags=DOWN)])), 80, terminal=True)
    assert "\x1b[31m" not in text


def test_large_numbers_are_shortened() -> None:
    shown = of(look(endpoints=[endpoint("a", inflight_tokens=1_234_567, inflight_requests=9_999)]))
    line = printed(shown, 200).splitlines()[-1]
    assert "1.2M" in line
    assert "9999" in line


def test_a_silent_instance_is_shown_as_silent() -> None:
    silent = msgspec.structs.replace(INSTANCE, life="silent")
    assert "silent" in printed(figures(silent, look(), None), 80).splitlines()[0]
    assert "running" not in printed(of(look()), 80).splitlines()[0]


def test_bands_are_shown_with_flow_control_the_most_important_first() -> None:
    bands = (
        BandLook(priority=-1, requests=12, bytes=34_000, oldest_age_s=5.0),
        BandLook(priority=5, requests=0, bytes=0, oldest_age_s=None),
    )
    lines = printed(of(look(bands=bands)), 100).splitlines()
    titles = next(at for at, line in enumerate(lines) if line.startswith("priority"))
    assert lines[titles + 1].split() == ["5", "0", "0", "–"]
    assert lines[titles + 2].split() == ["-1", "12", "34.0k", "5.00s"]
    assert not [line for line in printed(of(look()), 100).splitlines() if line.startswith("priority")]


def test_plugins_that_are_left_out_are_shown() -> None:
    assert not [line for line in printed(of(look()), 100).splitlines() if "left out" in line]
    lines = printed(of(look(left_out={"mine": 2})), 100).splitlines()
    assert "plugins that are left out for a while, because they failed too often: mine (in 2)" in lines


def test_endpoints_with_event_streams_show_how_their_cache_is_known() -> None:
    endpoints = [
        endpoint("a", stream=StreamFigures(why="", age_s=2.5, held=12_345)),
        endpoint("b", stream=StreamFigures(why="no events received yet", age_s=None, held=0)),
    ]
    text = printed(of(look(at=102.0, endpoints=endpoints), look(endpoints=endpoints)), 200)
    assert "matched precisely 1 of 2 endpoints  approximately: 1 (no events received yet)" in text
    precise, approximate = (line.split() for line in text.splitlines()[-2:])
    assert precise[-3:] == ["precise", "2.50s", "12.3k"]
    assert approximate[-3:] == ["approx", "–", "0"]
    assert "precise" not in printed(with_endpoints(3), 200)


def test_other_replicas_have_a_line_that_says_whether_they_count() -> None:
    seen = of(look(others=Others(replicas=2, requests=14, tokens=9000, waiting=3, age_s=0.01)))
    assert "other replicas 2: 14 requests in flight, 3 waiting  0.0 s ago" in printed(seen, 120)
    seen = of(look(others=Others(replicas=2, requests=14, tokens=9000, waiting=3, age_s=7.0)))
    assert "7.0 s ago, so they are ignored" in printed(seen, 120)
    assert "other replicas" not in printed(of(look()), 120)
