"""Which modules are compiled, and when a build of them is used."""

import inspect
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from compiled.build import STRUCT
from compiled.finder import LIBRARY, REASON, ROOT, SUFFIX, Mode, NotCompiled, decided, docstring, key, module_name, source
from compiled.modules import PATHS, SOURCES
from epp.config import registry
from epp.plugins.filters.roles import DecodeFilter
from epp.plugins.pickers.max_score import MaxScore
from tests.cases import cases


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the sources of a build."""
    for path in SOURCES:
        copy = tmp_path / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / path).read_bytes())
    return tmp_path


def built(tree: Path) -> Path:
    """An empty build of the sources in `tree`. Returns the folder of all builds."""
    folder = tree / "built" / key(tree)
    folder.mkdir(parents=True)
    (folder / f"{LIBRARY}{SUFFIX}").touch()
    return folder.parent


def test_a_build_of_exactly_this_source_is_used(tree: Path) -> None:
    folder = built(tree)
    assert decided(None, folder, tree) == (Mode(True, ""), folder / key(tree))
    assert decided("1", folder, tree)[0].compiled


@pytest.mark.parametrize("path", [PATHS[0], PATHS[-1], SOURCES[-1]])
def test_a_build_is_not_used_after_any_change_of_the_source(tree: Path, path: str) -> None:
    folder = built(tree)
    (tree / path).write_text((tree / path).read_text() + "\n")
    assert str(decided(None, folder, tree)[0]) == "interpreted (the source changed since it was built)"


def test_a_build_is_used_again_when_a_change_is_undone(tree: Path) -> None:
    folder, changed = built(tree), tree / PATHS[3]
    before = changed.read_text()
    changed.write_text("")
    assert not decided(None, folder, tree)[0].compiled
    changed.write_text(before)
    assert decided(None, folder, tree)[0].compiled


def test_without_a_build_the_reason_is_what_the_builder_has_noted(tree: Path) -> None:
    folder = tree / "built"
    assert decided(None, folder, tree)[0] == Mode(False, "it was never built")
    folder.mkdir()
    (folder / REASON).write_text("there is no C compiler")
    assert str(decided(None, folder, tree)[0]) == "interpreted (there is no C compiler)"


def test_0_runs_interpreted_whatever_is_built(tree: Path) -> None:
    assert decided("0", built(tree), tree)[0] == Mode(False, "EPP_COMPILED=0")


def test_1_refuses_to_run_interpreted(tree: Path) -> None:
    with pytest.raises(NotCompiled, match=r"EPP_COMPILED=1, .*\(it was never built\): run python -m compiled.build"):
        decided("1", tree / "built", tree)


def test_another_value_is_refused(tree: Path) -> None:
    with pytest.raises(NotCompiled, match="EPP_COMPILED=yes: write 0 "):
        decided("yes", tree / "built", tree)


def test_a_process_with_0_imports_the_source() -> None:
    program = "import epp.decision.decide, compiled.finder as f; print(f.choose(), type(epp.decision.decide.choose).__name__)"
    said = subprocess.run([sys.executable, "-c", program], env={"EPP_COMPILED": "0"}, cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout == "interpreted (EPP_COMPILED=0) function\n"


def test_the_source_of_a_module_is_known_in_both_modes() -> None:
    assert source("epp.decision.decide") == str(ROOT / "epp/decision/decide.py")
    assert source("epp.config.registry") == str(ROOT / "epp/config/registry.py")
    assert source("no.such.module") is None


def test_plugins_have_their_docstring_in_both_modes() -> None:
    assert docstring(MaxScore).startswith("Picks the `maxNumOfEndpoints` endpoints")
    assert docstring(DecodeFilter).startswith(inspect.cleandoc(DecodeFilter.__doc__))


def test_a_foreign_class_may_inherit_from_every_plugin() -> None:
    for cls in {cls for cls in registry.known().values() if cls.__module__ in map(module_name, PATHS)}:
        foreign = type("Foreign", (cls,), {})
        needed = {field.encode_name: 0.5 for field in msgspec.structs.fields(cls.Params) if field.required}
        assert foreign("f", msgspec.convert(needed, cls.Params)).name == "f"


# The rules of the list


def test_the_list_is_sorted_by_package_and_names_every_module_once() -> None:
    assert len(set(PATHS)) == len(PATHS)
    packages = [path.rpartition("/")[0] for path in PATHS]
    assert packages == sorted(packages)
    for package in set(packages):
        inside = [path for path in PATHS if path.rpartition("/")[0] == package]
        assert inside == sorted(inside)


@cases("path", PATHS)
def test_no_compiled_module_defines_a_msgspec_struct(path: str) -> None:
    assert not STRUCT.search((ROOT / path).read_text()), "mypyc drops the annotations: move it to another module"
