"""The documentation mentions only existing things, `.ci/run` runs the README's commands, and no page is too long."""

import ast
import importlib
import math
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from compiled.finder import VARIABLE as COMPILED
from epp.config import registry
from epp.metrics import PREFIX
from epp.metrics.catalogue import TAKEN
from epp.points.guard import VIOLATIONS
from loadtest.sim import main as sim
from tests.cases import cases
from workers.cli import EARLIER, PICKER, commands, main
from workers.cli.flags import Flag
from workers.host.options import PASSWORD_VARIABLE

ROOT = Path(__file__).parent.parent
README_LINES_MAX, PAGE_LINES_MAX = 120, 200
USING_MAX = 12  # pages for users; the others are background
PACKAGES = ("deploy", "docs", "epp", "loadtest", "shm", "tests", "workers")

PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)})/[\w./-]*\w/?")
MODULE = re.compile(r"python -m ((?:shm|tests|workers|loadtest)[\w.]*)")
TARGET = re.compile(r"\bmake ([a-z][a-z0-9-]*)")
GROUPS = "|".join(name for name, entry in PICKER.items() if entry.commands)
COMMAND = re.compile(rf"(?<![\w./-])epp ((?:(?:{GROUPS}) )?[a-z]+)\b([^`\n|;#]*)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
VARIABLE = re.compile(r"\bEPP_[A-Z0-9_]+")
METRIC = re.compile(rf"\b{PREFIX}\w*")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
FINDING = re.compile(r"\bFinding\(\s*\"([a-z-]+)\"")
SPAN = re.compile(r"`([^`\n]+)`")

FOREIGN_FLAGS = {
    "--filename", "--kustomize",  # kubectl
    "--file", "--tag", "--shm-size",  # docker
    "--enable-prompt-tokens-details",  # vLLM
    "--enable-scale-out",  # vLLM
    "--api-key",  # vLLM
    "--disable-access-log-for-endpoints",  # vLLM
    "--only", "--targets", "--cases", "--seconds", "--reference", "--smoke", "--five-minutes", "--outage-s", "--reads",  # benchmarks, tests
    "--hold", "--config", "--seeds", "--jobs", "--json", "--markdown", "--svg", "--sim", "--envoy", "--cold",  # make bench-routing
    "--trace", "--scale", "--busy", "--servers", "--pace",  # make bench-routing
    "--disable-hot-restart", "--concurrency", "--log-level",  # envoy
    "--silent", "--show-error", "--fail", "--retry", "--retry-all-errors", "--retry-delay",  # curl
    "--tries",  # make bench-attack
    "--list",  # python -m shm.inspect
    "--extract", "--strip-components", "--wildcards",  # tar
    "--native", "--reproduce", "--pure",  # make release, tests.release.containers
    "--find-links", "--pip-args",  # pip, pipx, uv
    "--input", "--network", "--read-only", "--read-only-tmpfs", "--cap-drop", "--security-opt", "--memory", "--all",  # podman, skopeo
    "--check", "--now", "--rm",  # sha256sum, systemctl, podman
}  # fmt: skip


def pages() -> list[Path]:
    """Returns all Markdown pages of the repository, without those of tools and builds."""
    found_pages = [*ROOT.glob("*.md")]
    for folder in (*PACKAGES, ".ci"):
        found_pages += (page for page in (ROOT / folder).rglob("*.md") if "node_modules" not in page.parts)
    return sorted(found_pages)


PAGES = pages()
README = (ROOT / "README.md").read_text()
BLOCKS = [(page, language, text) for page in PAGES for language, text in FENCE.findall(page.read_text())]
each_page = cases("page", PAGES)


def code(page: Path) -> Iterator[str]:
    """Yields the code of a page: each line of a block, and each span between backticks.

    Joins a line that ends with a backslash with the next one.
    """
    text = page.read_text()
    for _, block in FENCE.findall(text):
        yield from block.replace("\\\n", " ").splitlines()
    yield from SPAN.findall(FENCE.sub("", text))


def command(name: str) -> click.Command:
    """Returns a command of `epp` by its name, as `config check`."""
    found: click.Command = main
    for part in name.split():
        assert isinstance(found, click.Group)
        known = found.get_command(click.Context(found), part)
        assert known is not None
        found = known
    return found


def options(name: str) -> set[str]:
    """Returns the flags of one `epp` command."""
    return {opt for param in command(name).params for opt in (*param.opts, *param.secondary_opts)} | {"--help", "-h"}


NAMES = [name for name, _ in commands()]
OPTIONS = {name: options(name) for name in (*NAMES, *EARLIER)} | {"record": options("record start"), "config": {"--help"}}
OPTIONS["sim"] = {flag for action in sim.parser()._actions for flag in action.option_strings}  # its arguments go to loadtest
ANY_OPTION = set.union(*OPTIONS.values(), {"--version"})


def variables() -> set[str]:
    """Returns the environment variables of all flags, and those that no flag has."""
    return {COMPILED, PASSWORD_VARIABLE} | {
        variable for name in NAMES for param in command(name).params if isinstance(param, Flag) for variable in param.variables
    }


def metrics() -> set[str]:
    """Returns the names of all metrics, including those of the shipped plugins."""
    plugins = {metric.name for cls in registry.known().values() for metric in cls.metrics}
    return {PREFIX + name for name in TAKEN | plugins | {VIOLATIONS.name}}


def test_there_are_pages() -> None:
    assert len([page for page in PAGES if page.parent == ROOT / "docs"]) > 10


@each_page
def test_a_page_is_short(page: Path) -> None:
    most = {"README.md": README_LINES_MAX, "CHANGELOG.md": math.inf}.get(page.name, PAGE_LINES_MAX)  # a changelog only grows
    assert len(page.read_text().splitlines()) <= most


@each_page
def test_paths_in_it_exist(page: Path) -> None:
    for name in PATH.findall(page.read_text()):
        assert (ROOT / name).exists() or (ROOT / f"{name}.py").exists(), name


@each_page
def test_modules_that_it_runs_exist(page: Path) -> None:
    for name in MODULE.findall(page.read_text()):
        path = ROOT / name.rstrip(".").replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


@each_page
def test_make_targets_in_it_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {target for text in code(page) for target in TARGET.findall(text)}
    assert named <= targets


@each_page
def test_commands_and_flags_in_it_exist(page: Path) -> None:
    for text in code(page):
        for name, arguments in COMMAND.findall(text):
            assert name in OPTIONS, text
            flags = FLAG.findall(arguments.partition(" -- ")[0])
            assert set(flags) <= OPTIONS[name], text
        assert set(FLAG.findall(text)) <= ANY_OPTION | FOREIGN_FLAGS, text


@each_page
def test_it_calls_commands_by_their_present_names(page: Path) -> None:
    if page.name in ("CHANGELOG.md", "upgrading.md"):
        return
    named = {name for text in code(page) for name, _ in COMMAND.findall(text)}
    assert not named & {*EARLIER}


@each_page
def test_environment_variables_in_it_exist(page: Path) -> None:
    assert set(VARIABLE.findall(page.read_text())) <= variables()


@each_page
def test_metrics_in_it_exist(page: Path) -> None:
    known = metrics()
    for name in METRIC.findall(page.read_text()):
        if name.endswith("_"):  # the common prefix of several metrics
            assert any(other.startswith(name) for other in known), name
        else:
            assert re.sub(r"_(bucket|sum|count)$", "", name) in known or name in known, name


@each_page
def test_its_links_lead_to_files(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if not target.startswith(("http://", "https://", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize(("page", "text"), [(p, t) for p, language, t in BLOCKS if language == "python"])
def test_python_examples_compile_and_their_imports_exist(page: Path, text: str) -> None:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] in PACKAGES:
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{page}: {node.module} has no {alias.name}"


@cases("text", [text for _, language, text in BLOCKS if language == "yaml"])
def test_yaml_examples_are_valid_yaml(text: str) -> None:
    assert yaml.safe_load(text)


def test_the_example_plugin_is_the_shipped_one() -> None:
    shipped = (ROOT / "deploy/plugins/same_zone.py").read_text()
    examples = [text for _, language, text in BLOCKS if language == "python" and "class SameZone" in text]
    assert examples
    assert all(text in shipped for text in examples)


def test_every_finding_stands_on_the_page_of_the_doctor() -> None:
    files = [*(ROOT / "workers/supervisor/pages/state").glob("*findings.py"), *(ROOT / "workers/cli/doctor").glob("*.py")]
    found = {rule for file in files for rule in FINDING.findall(file.read_text())}
    page = (ROOT / "docs/doctor.md").read_text()
    assert len(found) > 40
    assert not [rule for rule in found if f"`{rule}`" not in page]


def test_users_need_few_pages() -> None:
    sections = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    (using,) = [section["Using"] for section in sections if "Using" in section]
    assert len(using) <= USING_MAX


def test_ci_runs_the_commands_of_readme_and_docs() -> None:
    assert "make test-first-day" in (ROOT / ".ci/run").read_text()
