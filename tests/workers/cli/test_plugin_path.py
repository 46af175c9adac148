"""The example in deploy/plugins, loaded as by `--plugin-path`, and the errors about unusable folders."""

import json
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from epp.candidates import Candidates, EndpointList, Snapshot
from epp.config import registry
from epp.config.load import load
from epp.decision.decide import schedule
from epp.points.base import REGISTERED
from tests.fakes import FakeServices, candidates, endpoints, request
from tests.workers.instances import made
from workers.cli import main
from workers.cli.configuration import load_config
from workers.cli.flags import BadConfiguration
from workers.cli.serve_options import serve_options
from workers.cli.trial import tried
from workers.host.options import Options
from workers.process.generations import Attempt

FOLDER = Path(__file__).parents[3] / "deploy" / "plugins"
TEXT = "plugins: [{type: same-zone-scorer}]\n"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    registry.known()
    types, finders = dict(REGISTERED), list(sys.meta_path)
    yield
    REGISTERED.clear()
    REGISTERED.update(types)
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.startswith(registry.FOLDER_PACKAGE)]:
        del sys.modules[name]


def epp(*args: str, stdin: str = "") -> Result:
    return CliRunner().invoke(main, [*args], input=stdin)


def zones(*names: str) -> Candidates:
    """Endpoints that differ only in their zones."""
    plain = candidates({"waiting_requests": [0] * len(names)}).snapshot
    endpoint_list = EndpointList(endpoints(len(names), [{"zone": name} for name in names]))
    zoned = Snapshot(endpoint_list, {}, fresh=plain.fresh, known=plain.known, down=plain.down, inflight_at_scrape=plain.inflight_at_scrape)
    return Candidates(zoned, plain.inflight_at_scrape)


def test_the_example_is_short() -> None:
    assert len((FOLDER / "same_zone.py").read_text().splitlines()) <= 16


@pytest.mark.parametrize("zone", ["a", "b", "c"])
def test_the_example_routes_to_the_zone_of_the_request(zone: str) -> None:
    config = load_config(Options(config_text=TEXT, endpoints="h:1", plugin_path=str(FOLDER)))
    config.pipeline.start(FakeServices())  # type: ignore[arg-type]
    decision = schedule(config.pipeline, request(headers={"x-zone": zone}), zones("a", "b", "c"))
    assert [endpoint.labels["zone"] for endpoint in decision.targets] == [zone]


def foreign_of(folder: Path) -> tuple[str, ...]:
    """Tries a configuration. Returns what the trial tells of its foreign plugins."""
    file = folder / "c.yaml"
    file.write_text("plugins: [{type: same-zone-scorer, name: mine}, {type: queue-scorer}]")
    with made(folder, config_file=str(file), plugin_path=str(FOLDER), endpoints="127.0.0.1:1") as instance:
        bundle = tried(instance, Attempt(1, 2, instance.layout.names)).bundle
    assert bundle is not None
    return bundle.foreign


def test_a_trial_tells_the_names_of_foreign_plugins(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(1) as trial:  # a trial refuses a process that has children, as this one may have
        assert trial.apply(foreign_of, (tmp_path,)) == ("mine",)


def test_check_plugins_and_schema_accept_the_types_of_the_folder() -> None:
    assert epp("check", "-q", "--plugin-path", str(FOLDER), "-", stdin=TEXT).exit_code == 0
    assert "  same-zone-scorer  " in afresh("plugins", f"--plugin-path={FOLDER}").stdout
    one = afresh("plugins", f"--plugin-path={FOLDER}", "same-zone-scorer").stdout
    assert f"    file: {FOLDER / 'same_zone.py'}\n" in one
    types = json.loads(afresh("schema", f"--plugin-path={FOLDER}").stdout)["$defs"]["PluginEntry"]["allOf"]
    assert any(rule["if"]["properties"]["type"]["const"] == "same-zone-scorer" for rule in types)


def afresh(*args: str) -> Result:
    """Runs a command as in a process of its own, without types that an earlier command registered."""
    for name in [name for name, cls in REGISTERED.items() if cls.__module__.startswith(registry.FOLDER_PACKAGE)]:
        del REGISTERED[name]
    return epp(*args)


def test_without_the_folder_the_type_is_unknown() -> None:
    assert "plugin type 'same-zone-scorer' is not registered" in epp("check", "-", stdin=TEXT).stderr


def test_a_missing_folder_ends_every_command_with_its_path(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    for result in (epp("check", f"--plugin-path={gone}", "-"), epp("plugins", f"--plugin-path={gone}")):
        assert (result.exit_code, result.stderr) == (78, f"--plugin-path {gone}: No such file or directory\n")


def test_a_file_that_cannot_be_imported_ends_the_start_with_78(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("\nboom\n")
    with pytest.raises(BadConfiguration) as caught:
        load_config(Options(config_text=TEXT, endpoints="h:1", plugin_path=str(tmp_path)))
    assert caught.value.exit_code == 78
    assert f"--plugin-path: plugin file {tmp_path}/mine.py:2 cannot be imported: NameError" in caught.value.message


def test_a_plugin_that_starts_a_thread_before_the_fork_ends_the_start_with_78(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import threading\nended = threading.Event()\nthreading.Thread(target=ended.wait, name='poller').start()\n"
        + (FOLDER / "same_zone.py").read_text().replace("same-zone", "same-rack")
    )
    with pytest.raises(BadConfiguration, match=r"error\[thread\]: a plugin started a thread \(poller\)") as caught:
        load_config(Options(config_text=TEXT, endpoints="h:1", plugin_path=str(tmp_path)))
    next(m for m in sys.modules.values() if getattr(m, "__file__", "") == str(tmp_path / "mine.py")).ended.set()
    assert caught.value.exit_code == 78


def test_a_type_as_a_class_path_needs_no_folder() -> None:
    assert load("plugins: [{type: 'tests.epp.config_plugins:Plain'}]", "c.yaml").pipeline


def test_serve_takes_the_folder_from_the_command_line_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    @serve_options
    def command(options: Options) -> None:
        click.echo(options.plugin_path)

    assert CliRunner().invoke(command, ["--plugin-path=/etc/epp/plugins"]).stdout == "/etc/epp/plugins\n"
    monkeypatch.setenv("EPP_PLUGIN_PATH", "/from/environment")
    assert CliRunner().invoke(command, []).stdout == "/from/environment\n"
