"""The program of a picker is replaced under load: by itself, by one that does not start, by one that lays out the memory in another way."""

import fcntl
import http.client
import json
import shutil
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import COMPLETIONS, Cluster, Picker, ask, completion, eventually, run
from tests.e2e.test_reload import World, children, worlds
from workers.cli.demo.children import python

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = "workers/process/layout.py"
SCALAR = ("OWN_GAUGES: Final = (\n", 'OWN_GAUGES: Final = (\n    "news",\n')
COLUMN = ("*SHOWN, *pipeline.columns]", '*SHOWN, Column("news", float), *pipeline.columns]')
INDEX = ("IndexSchema(options.index_entries)", "IndexSchema(options.index_entries + 8)")


class Repeated:
    """Calls a function again and again until it is stopped."""

    def __init__(self, once: Callable[[], None]) -> None:
        self._once = once
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            self._once()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


class Load(Repeated):
    """Sends one request after the other."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.statuses: list[int] = []
        super().__init__(self._send)

    def _send(self) -> None:
        body = completion(f"request {len(self.statuses)}", max_tokens=2)
        self.statuses.append(ask(self._port, COMPLETIONS, body).status)


class Readiness(Repeated):
    """Asks for /readyz, and counts the first lines of the answers. While the supervisor is replaced, nobody answers."""

    def __init__(self, picker: Picker) -> None:
        self._url = f"http://127.0.0.1:{picker.metrics}/readyz"
        self.answers: Counter[str] = Counter()
        super().__init__(self._ask)

    def _ask(self) -> None:
        try:
            with urllib.request.urlopen(self._url, timeout=60.0) as answer:
                self.answers[answer.readline().decode().strip()] += 1
        except urllib.error.HTTPError as refused:
            self.answers[refused.readline().decode().strip()] += 1
        except (OSError, http.client.HTTPException):
            pass


def upgrade(cluster: Cluster, picker: Picker) -> tuple[int, str, str]:
    """Runs `epp config reload --exec`. Returns its exit code, output and errors."""
    where = (f"--instance={picker.instance}", f"--run-dir={cluster.directory / 'run'}")
    done = run(python("workers", "reload", "--exec", "--timeout=2m", *where), 130.0)
    return done.returncode, done.stdout, done.stderr


def other_version(folder: Path, *changes: tuple[str, str]) -> Path:
    """Makes a copy of `workers` with a changed layout. Returns the folder for PYTHONPATH, which is empty until the copy is installed."""
    made, installed = folder / "made", folder / "installed"
    installed.mkdir()
    shutil.copytree(ROOT / "workers", made, ignore=shutil.ignore_patterns("__pycache__"))
    file = made / LAYOUT.removeprefix("workers/")
    text = file.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file.write_text(text)
    return installed


@pytest.fixture
def world(cluster: Cluster) -> Iterator[World]:
    yield from worlds(cluster)


def test_the_program_is_replaced_and_no_request_fails(world: World) -> None:
    port = world.cluster.envoy(world.picker)
    parent = world.picker.child.process.pid
    assert world.after(world.config, world.discovery("- {type: kv-cache-utilization-scorer}\n")).successful
    assert ask(port, COMPLETIONS, completion("before", max_tokens=1)).status == 200
    picks, before = world.picker.counter("picks_total"), set(children(parent))
    load = Load(port)
    code, said, errors = upgrade(world.cluster, world.picker)
    load.stop()
    assert (code, said.split(" (")[0]) == (0, "the installed version runs in 2 workers, with generation 2"), errors
    after = set(children(parent))
    assert len(after) == len(before)
    assert not after & before
    assert set(load.statuses) == {200}
    assert eventually(lambda: bool(world.picker.page()))
    assert world.picker.counter("picks_total") >= picks + len(load.statuses)
    assert world.after(world.config, world.discovery("- {type: lora-affinity-scorer}\n")).generation > 2
    assert ask(port, COMPLETIONS, completion("afterwards", max_tokens=1)).status == 200


@pytest.mark.parametrize(
    ("changes", "anew"),
    [([SCALAR], ["lanes"]), ([SCALAR, COLUMN, INDEX], ["state", "lanes", "index"])],
    ids=["lanes", "everything"],
)
def test_a_program_with_another_layout_goes_on_and_no_request_fails(
    cluster: Cluster, changes: list[tuple[str, str]], anew: list[str]
) -> None:
    installed = other_version(cluster.directory, *changes)
    fleet = cluster.fleet(2, "--prefill-us-per-token", "1", "--decode-ms", "5")
    state = cluster.directory / "state"
    picker = cluster.picker(fleet.file, f"--state-dir={state}", workers=2, under=("env", f"PYTHONPATH={installed}"))
    port, parent = cluster.envoy(picker), picker.child.process.pid
    prompt = "a prompt that both endpoints may have in their caches " * 40
    assert ask(port, COMPLETIONS, completion(prompt, max_tokens=1)).status == 200
    assert eventually(lambda: picker.counter("prefix_indexer_size") > 0)
    entries, before = picker.counter("prefix_indexer_size"), set(children(parent))
    load, readiness = Load(port), Readiness(picker)
    (cluster.directory / "made").rename(installed / "workers")
    code, said, errors = upgrade(cluster, picker)
    load.stop()
    readiness.stop()
    assert (code, said.split(" (")[0]) == (0, "the installed version runs in 2 workers, with generation 1"), errors
    assert set(readiness.answers) == {"ok"}
    assert f'"segments": {json.dumps(anew)}' in picker.child.text()
    after = set(children(parent))
    assert (len(after), after & before) == (len(before), set())
    assert set(load.statuses) == {200}
    assert eventually(lambda: picker.complete(2))
    assert ("index" in anew) or picker.counter("prefix_indexer_size") >= entries
    assert picker.counter("picks_total") >= 1
    with (state / "lock").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert ask(port, COMPLETIONS, completion("afterwards", max_tokens=1)).status == 200


def test_a_program_that_does_not_start_replaces_nothing(cluster: Cluster) -> None:
    broken = cluster.directory / "broken"
    customized = cluster.directory / "site"
    customized.mkdir()
    (customized / "sitecustomize.py").write_text(f"import os\nos.path.exists({str(broken)!r}) and os._exit(9)\n")
    fleet = cluster.fleet(1)
    picker = cluster.picker(fleet.file, workers=1, under=("env", f"PYTHONPATH={customized}"))
    before = children(picker.child.process.pid)
    broken.touch()
    code, _, errors = upgrade(cluster, picker)
    assert code == 78
    assert "its process ended before it was done" in errors
    assert children(picker.child.process.pid) == before
    assert picker.complete(1)
