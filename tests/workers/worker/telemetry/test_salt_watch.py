"""What cache salts cost, and whether servers obey them, by a sample of prompts."""

from epp.decision.decision import Decision, Usage
from epp.metrics.request_series import PREDICTION, SALT_IGNORED
from epp.request import Prompt, Request
from shm.segment import Region
from shm.series import SeriesWriter
from tests.fakes import candidates
from workers.process.layout import series_schema_of
from workers.worker.telemetry.salt_watch import FIRST_BYTES, KEPT_MAX, SAMPLED, SETTLED_S, SaltWatch

START = 100.0
LATER = START + SETTLED_S


class Watched:
    def __init__(self, kept_max: int = KEPT_MAX) -> None:
        schema = series_schema_of(PREDICTION, areas=1)
        self.series = SeriesWriter(schema, schema.area(Region(memoryview(bytearray(schema.bytes))), 0))
        self.checked = self.lost = 0
        self.watch = SaltWatch(self.series, self._check, self._lose, seed=3, now=START, kept_max=kept_max)
        (self.target, *_) = candidates(count=1).endpoints

    def _check(self, tokens: int) -> None:
        self.checked += tokens

    def _lose(self, tokens: int) -> None:
        self.lost += tokens

    def send(self, salt: str, text: str, cached: int = 0, now: float = LATER) -> None:
        request = Request(id="r", path="/v1/completions", headers={}, now=now)
        request.cache_salt, request.prompt = salt, Prompt(text.encode)
        self.watch.routed(request)
        self.watch.answered(request, Decision((self.target,), {}, primary=""), Usage(len(text) // 4, 1, cached))

    @property
    def ignored(self) -> int:
        block = self.series.block((self.target.name, self.target.namespace, str(self.target.port)))
        return self.series.words[block + self.series.counter_at[SALT_IGNORED.name]]


def sampled(watched: Watched, count: int = 1) -> list[str]:
    """Returns the first bytes of prompts that are looked at."""
    found: list[str] = []
    number = 0
    while len(found) < count:
        number += 1
        text = f"{number} ".ljust(FIRST_BYTES, "x")
        before = watched.checked
        watched.send("nobody", text)
        if watched.checked > before:
            found.append(text)
    watched.watch._salts.clear()
    watched.checked = watched.lost = 0
    return found


def test_what_another_salt_had_is_lost_and_what_the_own_salt_had_is_not() -> None:
    watched = Watched()
    (first,) = sampled(watched)
    text = first + "y" * 3 * FIRST_BYTES
    watched.send("a", text)
    assert (watched.checked, watched.lost) == (1024, 0)
    watched.send("b", text)
    assert (watched.checked, watched.lost) == (2048, 1024)
    watched.send("b", text)
    watched.send("a", text)
    assert watched.lost == 1024


def test_only_the_part_that_is_alike_is_lost() -> None:
    watched = Watched()
    (first,) = sampled(watched)
    watched.send("a", first + "y" * 3 * FIRST_BYTES)
    watched.send("b", first + "y" * FIRST_BYTES + "z" * 2 * FIRST_BYTES)
    assert watched.lost == 512


def test_a_server_that_has_cached_what_only_others_have_sent_ignores_the_salt() -> None:
    watched = Watched()
    first, second = sampled(watched, 2)
    watched.send("a", first)
    watched.send("b", first, cached=250)
    assert watched.ignored == 1
    watched.send("b", first, cached=250)  # its own by now
    watched.send("a", second)
    watched.send("b", second, cached=0)
    assert watched.ignored == 1


def test_nothing_counts_as_ignored_soon_after_a_start_because_nobody_knows_what_servers_have() -> None:
    watched = Watched()
    (first,) = sampled(watched)
    watched.send("a", first, now=LATER - 1)
    watched.send("b", first, cached=250, now=LATER - 1)
    assert (watched.ignored, watched.lost) == (0, 256)


def test_a_part_of_the_prompts_is_looked_at_and_short_ones_and_those_without_a_salt_never() -> None:
    watched = Watched()
    for number in range(2000):
        watched.send("a", f"{number} ".ljust(FIRST_BYTES, "x"))
    assert 0.7 < watched.checked / 256 / (2000 / SAMPLED) < 1.3
    before = watched.checked
    (first,) = sampled(watched)
    watched.send("", first)
    watched.send("a", first[:-1])
    assert watched.checked == 0 < before


def test_memory_is_bounded() -> None:
    watched = Watched(kept_max=4)
    for first in sampled(watched, 9):
        watched.send("a", first)
    assert len(watched.watch._salts) <= 4
