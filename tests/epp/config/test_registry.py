import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import epp.plugins
from epp.config import registry
from epp.data import WAITING
from epp.plugin import NoParams, Scorer
from epp.points.base import BUILT_IN, REGISTERED
from tests.epp.config_plugins import HERE, Limit, Plain, Strict, StrictParams
from workers.process.loading import read_plugins


@pytest.fixture
def empty() -> Iterator[None]:
    """Clears the import cache, and removes the types that the test registered afterwards."""
    before = dict(REGISTERED)
    registry.known.cache_clear(), registry._import_installed.cache_clear()
    yield
    registry.known.cache_clear(), registry._import_installed.cache_clear()
    REGISTERED.clear()
    REGISTERED.update(before)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty: None) -> Path:
    """A second folder of the package epp.plugins."""
    monkeypatch.setattr(epp.plugins, "__path__", [*epp.plugins.__path__, str(tmp_path)])
    return tmp_path


def entry_points(monkeypatch: pytest.MonkeyPatch, folder: Path, **values: str) -> None:
    """Installs a distribution with these entry points of plugins in the folder."""
    installed = folder / "further_plugins-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: further-plugins\nVersion: 1.0\n")
    lines = [f"[{registry.ENTRY_POINTS}]", *(f"{name} = {value}" for name, value in values.items())]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(folder))


def test_built_in_plugins_are_found_by_walking_the_folder() -> None:
    known = registry.known()
    assert {"queue-scorer", "max-score-picker", "single-profile-handler", "openai-parser"} <= known.keys()
    assert registry.find("queue-scorer").type_name == "queue-scorer"


def test_every_built_in_type_has_a_kind_and_parameters_that_refuse_unknown_fields() -> None:
    for name, cls in registry.known().items():
        if cls.__module__.startswith("epp.plugins."):
            assert registry.kinds(cls), name
            assert cls.Params.__struct_config__.forbid_unknown_fields, name
            assert cls.Params.__struct_config__.frozen, name


def test_a_module_that_cannot_be_imported_stops_the_start_with_its_name(folder: Path) -> None:
    (folder / "broken_one.py").write_text("import no_such_module_anywhere\n")
    with pytest.raises(registry.PluginImportError, match=r"plugin module epp\.plugins\.broken_one cannot be imported: ModuleNotFoundError"):
        registry.known()


def test_a_package_that_cannot_be_imported_stops_the_start_with_its_name(folder: Path) -> None:
    (folder / "broken_package").mkdir()
    (folder / "broken_package" / "__init__.py").write_text("raise RuntimeError('no')\n")
    with pytest.raises(registry.PluginImportError, match=r"broken_package cannot be imported: RuntimeError: no"):
        registry.known()


def test_a_new_file_in_the_folder_is_a_new_type(folder: Path) -> None:
    (folder / "warmth.py").write_text(
        dedent("""\
        from epp.plugin import Scorer, plugin

        @plugin("warmth-scorer", "heat-scorer")
        class Warmth(Scorer):
            def score(self, request, candidates, profile):
                return None
        """)
    )
    assert registry.find("warmth-scorer") is registry.find("heat-scorer")
    del sys.modules["epp.plugins.warmth"]


def test_the_types_that_are_read_from_the_sources_are_those_that_the_modules_register(empty: None) -> None:
    names = registry.names()
    built_in = dict(BUILT_IN)
    assert built_in.items() >= {"queue-scorer": "epp.plugins.scorers.reported"}.items()
    own = {name: cls.__module__ for name, cls in registry.known().items() if cls.__module__.startswith("epp.plugins.")}
    assert own == built_in
    assert names >= own.keys()


def test_a_configuration_imports_the_modules_of_its_plugins_alone() -> None:
    code = """
        import sys
        from epp.config.load import load
        load(None, "")
        print(*sorted(name for name in sys.modules if name.startswith("epp.plugins.scorers.")))
        """
    ran = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True)
    used = ("learned_latency",)
    found = {name.rpartition(".")[2] for name in ran.stdout.split()}
    assert {name for name in found if not name.startswith("_")} == set(used)


def test_a_decorator_that_the_source_does_not_spell_out_registers_its_type_too(folder: Path) -> None:
    text = "from epp.plugin import Scorer, plugin\nNAME = 'warmth-scorer'\n@plugin(NAME)\nclass Warmth(Scorer):\n"
    (folder / "warmth_named.py").write_text(text + "    def score(self, request, candidates, profile): return None\n")
    assert registry.find("warmth-scorer").__module__ == "epp.plugins.warmth_named"
    del sys.modules["epp.plugins.warmth_named"]


def test_installed_plugins_are_found_by_entry_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty: None) -> None:
    entry_points(monkeypatch, tmp_path, **{"plain-filter": f"{HERE}:Plain", "module-only": HERE})
    monkeypatch.setattr(Plain, "type_name", "")
    assert registry.find("plain-filter") is Plain


def test_an_entry_point_that_cannot_be_imported_stops_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty: None) -> None:
    entry_points(monkeypatch, tmp_path, gone="no_such_module_anywhere:Thing")
    with pytest.raises(registry.PluginImportError, match=r"entry point 'gone' \(no_such_module_anywhere:Thing\)"):
        registry.known()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("queue-scorer", f"{__name__}:Forgets", "cannot be imported: ValueError: plugin type 'queue-scorer' is registered by"),
        ("mine", f"{HERE}:NoPlugin", ":NoPlugin) of group epp.plugins: class NoPlugin is not a plugin class"),
        ("mine", "json:dumps", "(json:dumps) of group epp.plugins: class dumps is not a plugin class: inherit"),
        ("mine", "half_a_module", "(half_a_module) of group epp.plugins: class Half has no method score"),
    ],
)  # fmt: skip
def test_plugins_of_an_entry_point_are_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty: None, name: str, value: str, message: str
) -> None:
    half = "from epp.plugin import Scorer, plugin\n@plugin('half-a-scorer')\nclass Half(Scorer):\n    pass\n"
    (tmp_path / "half_a_module.py").write_text(half)
    entry_points(monkeypatch, tmp_path, **{name: value})
    with pytest.raises(registry.PluginImportError) as caught:
        registry.known()
    assert message in str(caught.value)


def test_a_type_may_be_a_class_path() -> None:
    assert registry.find(f"{HERE}:Plain") is Plain


@pytest.mark.parametrize(
    ("type_name", "rule", "message"),
    [
        ("queue-scorr", "unknown-type", "plugin type 'queue-scorr' is not registered"),
        ("zzzz", "unknown-type", "is not registered"),
        ("newer-scorer", "unavailable-type", "'newer-scorer' of llm-d-router is not available in this version"),
        ("no_such_module_anywhere:Thing", "plugin-import", "module no_such_module_anywhere cannot be imported"),
        ("a b:Thing", "unknown-type", "is not of the form package.module:Class"),
        (":", "unknown-type", "is not of the form package.module:Class"),
        (f"{HERE}:Missing", "unknown-type", "has no plugin class 'Missing'"),
        (f"{HERE}:NoPlugin", "unknown-type", "has no plugin class 'NoPlugin'"),
        ("epp.plugin:Plugin", "unknown-type", "has no plugin class 'Plugin'"),
    ],
)
def test_a_type_that_names_no_class_is_refused_with_the_reason(
    type_name: str, rule: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "REFERENCE_TYPES", registry.REFERENCE_TYPES | {"newer-scorer"})
    with pytest.raises(registry.UnknownType) as caught:
        registry.find(type_name)
    assert caught.value.rule == rule
    assert message in str(caught.value)


def test_a_misspelt_type_gets_a_hint() -> None:
    with pytest.raises(registry.UnknownType) as caught:
        registry.find("Queue-Scorer")
    assert caught.value.hint == "did you mean 'queue-scorer'?"


@pytest.mark.parametrize("misspelt", ["pd-profile-handlr", "prefill-header-handlr"])
def test_a_hint_names_the_substitute_of_a_deprecated_type(misspelt: str) -> None:
    with pytest.raises(registry.UnknownType) as caught:
        registry.find(misspelt)
    assert caught.value.hint == "did you mean 'disagg-profile-handler'?"


def test_stable_and_experimental_types_are_disjoint_and_deprecated_types_are_stable() -> None:
    assert not registry.STABLE_TYPES & registry.EXPERIMENTAL_TYPES
    assert registry.DEPRECATED_TYPES.keys() <= registry.STABLE_TYPES


@pytest.mark.parametrize(
    ("params", "why"),
    [(StrictParams("refused", [Limit(0.5)]), "fileName: no such file"), (StrictParams("broken"), "RuntimeError: it broke")],
)
def test_the_reason_of_a_constructor_that_fails_is_told(params: StrictParams, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}$"):
        registry.made("strict", Strict, params)


def test_a_constructor_that_does_not_fail_makes_the_plugin() -> None:
    assert isinstance(registry.made("good", Plain, NoParams()), Plain)


class Leaves(Scorer):
    def __init__(self, name: str, params: Any) -> None:
        raise SystemExit(3)


class Forgets(Scorer):
    def __init__(self, name: str, params: Any) -> None:
        pass


class Bare(Scorer):
    def __init__(self, name: str, params: Any) -> None:
        super().__init__(name, params)
        self.consumes = WAITING  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (Leaves, "SystemExit: 3"),
        (Forgets, "class Forgets has a constructor that does not call super().__init__(name, params)"),
        (Bare, "class Bare has consumes = Column('waiting_requests', int): write a tuple"),
    ],
)
def test_a_foreign_constructor_that_leaves_a_plugin_unusable_is_an_error(cls: type[Scorer], why: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(why)):
        registry.made(cls.__name__, cls, NoParams())


def test_kinds_are_extension_points_in_the_order_in_which_they_run() -> None:
    class Both(Scorer, Strict):
        pass

    assert [kind.__name__ for kind in registry.kinds(Both)] == ["Filter", "Scorer"]


# Plugins of a folder

WARMTH = """\
from epp.plugin import Scorer, plugin

@plugin("warmth-scorer", "heat-scorer")
class Warmth(Scorer):
    \"\"\"Warm.\"\"\"

    def score(self, request, candidates, profile):
        return None
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    """A folder of plugins. Its types and modules are removed afterwards."""
    registry.known()
    types, modules, finders = dict(REGISTERED), set(sys.modules), list(sys.meta_path)
    (tmp_path / "own").mkdir()
    yield tmp_path / "own"
    REGISTERED.clear()
    REGISTERED.update(types)
    sys.meta_path[:] = finders
    for name in sys.modules.keys() - modules:
        if name.startswith(registry.FOLDER_PACKAGE):
            del sys.modules[name]


def refused(folder: Path) -> str:
    with pytest.raises(registry.PluginImportError) as caught:
        registry.add_sources(str(folder), read_plugins(str(folder)))
    return str(caught.value)


def test_every_python_file_of_a_folder_registers_its_types(own: Path) -> None:
    (own / "b_warmth.py").write_text(WARMTH)
    (own / "a-cold.py").write_text(WARMTH.replace("warmth", "cold").replace("heat", "ice"))
    (own / "notes.txt").write_text("no Python")
    assert registry.add_sources(str(own), read_plugins(str(own))) == ["cold-scorer", "ice-scorer", "warmth-scorer", "heat-scorer"]
    assert registry.find("heat-scorer") is registry.find("warmth-scorer")
    assert registry.stability(registry.find("warmth-scorer")) == "external"


def test_files_may_share_a_module_with_a_leading_underscore(own: Path) -> None:
    (own / "_shared.py").write_text("HEAT = 5\n")
    (own / "json.py").write_text("from ._shared import HEAT\n" + WARMTH + "    heat = HEAT\n")
    registry.add_sources(str(own), read_plugins(str(own)))
    assert registry.find("warmth-scorer").heat == 5  # type: ignore[attr-defined]
    assert sys.modules["json"].__file__ != str(own / "json.py")


def test_no_compiled_files_are_written(own: Path) -> None:
    (own / "_shared.py").write_text("HEAT = 5\n")
    (own / "warmth.py").write_text("from ._shared import HEAT\n" + WARMTH)
    registry.add_sources(str(own), read_plugins(str(own)))
    assert sorted(path.name for path in own.iterdir()) == ["_shared.py", "warmth.py"]


def test_files_of_two_folders_may_have_the_same_name(own: Path) -> None:
    other = own.parent / "other"
    other.mkdir()
    (own / "warmth.py").write_text(WARMTH)
    (other / "warmth.py").write_text(WARMTH.replace("warmth", "cold").replace("heat", "ice"))
    registry.add_sources(str(own), read_plugins(str(own)))
    registry.add_sources(str(other), read_plugins(str(other)))
    assert registry.find("warmth-scorer") is not registry.find("cold-scorer")


def test_a_file_that_cannot_be_imported_is_named_with_line_and_cause(own: Path) -> None:
    (own / "warmth.py").write_text(WARMTH + "\n1 / 0\n")
    assert refused(own) == f"plugin file {own}/warmth.py:10 cannot be imported: ZeroDivisionError: division by zero"


def test_an_import_error_has_its_line_for_a_relative_folder_path_too(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own / "warmth.py").write_text(WARMTH + "\n1 / 0\n")
    monkeypatch.chdir(own.parent)
    assert refused(Path("own")).startswith("plugin file own/warmth.py:10 cannot be imported")


@pytest.mark.parametrize("name", ["''", "' a'", "'a\\n'", "3"])
def test_a_type_name_that_no_configuration_can_have_is_refused(own: Path, name: str) -> None:
    (own / "warmth.py").write_text(WARMTH.replace('"warmth-scorer"', name))
    assert "warmth.py:3 cannot be imported: ValueError: plugin type" in refused(own)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("class (", "SyntaxError: invalid syntax (warmth.py, line 1)"),
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("from . import gone", "ImportError: cannot import name 'gone'"),
    ],
)
def test_any_import_failure_of_a_file_is_an_error_with_its_cause(own: Path, text: str, cause: str) -> None:
    (own / "warmth.py").write_text(text)
    assert f"{own}/warmth.py" in refused(own)
    assert cause in refused(own)


def test_a_file_cannot_take_a_registered_type_name(own: Path) -> None:
    (own / "warmth.py").write_text(WARMTH.replace("warmth-scorer", "queue-scorer"))
    message = refused(own)
    assert f"{own}/warmth.py:3" in message
    assert "plugin type 'queue-scorer' is registered by epp.plugins.scorers.reported and by epp_plugin_path_" in message


def test_two_classes_of_one_file_cannot_have_one_type(own: Path) -> None:
    (own / "warmth.py").write_text(WARMTH + WARMTH.replace("Warmth", "Other"))
    assert "plugin type 'warmth-scorer' is registered by" in refused(own)


def test_a_file_without_a_plugin_and_a_folder_without_a_file_are_errors(own: Path) -> None:
    assert "has no Python file that registers a plugin type" in refused(own)
    (own / "warmth.py").write_text("class Warmth: pass\n")
    assert "warmth.py registers no plugin type; decorate a class with @plugin(...)" in refused(own)
