import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import epp.plugins
from epp import registry
from epp.data import WAITING
from epp.plugin import REGISTERED, NoParams, Scorer
from tests.epp.config_plugins import HERE, Limit, Plain, Strict, StrictParams


@pytest.fixture
def empty() -> Iterator[None]:
    """Imports again on the next look, and forgets afterwards what the test registered."""
    before = dict(REGISTERED)
    registry._import_all.cache_clear()
    yield
    registry._import_all.cache_clear()
    REGISTERED.clear()
    REGISTERED.update(before)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty: None) -> Path:
    """A second folder of the package epp.plugins."""
    monkeypatch.setattr(epp.plugins, "__path__", [*epp.plugins.__path__, str(tmp_path)])
    return tmp_path


def entry_points(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    made = [importlib.metadata.EntryPoint(name, value, registry.ENTRY_POINTS) for name, value in values.items()]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: made if group == registry.ENTRY_POINTS else []
    )


def test_own_plugins_are_found_by_walking_the_folder() -> None:
    known = registry.known()
    assert {"queue-scorer", "max-score-picker", "single-profile-handler", "openai-parser"} <= known.keys()
    assert registry.find("queue-scorer").type_name == "queue-scorer"


def test_every_own_type_is_a_plugin_with_a_kind_and_parameters_that_refuse_unknown_fields() -> None:
    for name, cls in registry.known().items():
        if cls.__module__.startswith("epp.plugins."):
            assert registry.kinds(cls), name
            assert cls.Params.__struct_config__.forbid_unknown_fields, name
            assert cls.Params.__struct_config__.frozen, name


def test_a_module_that_cannot_be_imported_stops_the_start_and_is_named(folder: Path) -> None:
    (folder / "broken_one.py").write_text("import no_such_module_anywhere\n")
    with pytest.raises(
        registry.PluginImportError,
        match=r"plugin module epp\.plugins\.broken_one cannot be imported: ModuleNotFoundError",
    ):
        registry.known()


def test_a_package_that_cannot_be_imported_is_named_as_well(folder: Path) -> None:
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


def test_installed_plugins_come_by_entry_point(monkeypatch: pytest.MonkeyPatch, empty: None) -> None:
    entry_points(monkeypatch, **{"plain-filter": f"{HERE}:Plain", "module-only": HERE})
    monkeypatch.setattr(Plain, "type_name", "")
    assert registry.find("plain-filter") is Plain


def test_an_entry_point_that_cannot_be_imported_stops_the_start(monkeypatch: pytest.MonkeyPatch, empty: None) -> None:
    entry_points(monkeypatch, gone="no_such_module_anywhere:Thing")
    with pytest.raises(registry.PluginImportError, match=r"entry point 'gone' \(no_such_module_anywhere:Thing\)"):
        registry.known()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("queue-scorer", f"{__name__}:Forgets", "cannot be imported: ValueError: plugin type 'queue-scorer' is registered by"),
        ("mine", f"{HERE}:NoPlugin", ":NoPlugin) of group epp.plugins: class NoPlugin is no plugin class"),
        ("mine", "json:dumps", "(json:dumps) of group epp.plugins: class dumps is no plugin class: inherit"),
        ("mine", "half_a_module", "(half_a_module) of group epp.plugins: class Half has no method score"),
    ],
)  # fmt: skip
def test_whatever_an_entry_point_brings_is_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty: None, name: str, value: str, said: str
) -> None:
    half = "from epp.plugin import Scorer, plugin\n@plugin('half-a-scorer')\nclass Half(Scorer):\n    pass\n"
    (tmp_path / "half_a_module.py").write_text(half)
    monkeypatch.syspath_prepend(str(tmp_path))
    entry_points(monkeypatch, **{name: value})
    with pytest.raises(registry.PluginImportError) as caught:
        registry.known()
    assert said in str(caught.value)


def test_a_type_may_name_a_class_by_its_path() -> None:
    assert registry.find(f"{HERE}:Plain") is Plain


@pytest.mark.parametrize(
    ("type_name", "rule", "message"),
    [
        ("queue-scorr", "unknown-type", "plugin type 'queue-scorr' is not registered"),
        ("zzzz", "unknown-type", "is not registered"),
        ("dcgm-extractor", "unavailable-type", "'dcgm-extractor' of llm-d-router is not available in this version"),
        ("no_such_module_anywhere:Thing", "plugin-import", "module no_such_module_anywhere cannot be imported"),
        ("a b:Thing", "unknown-type", "is not of the form package.module:Class"),
        (":", "unknown-type", "is not of the form package.module:Class"),
        (f"{HERE}:Missing", "unknown-type", "has no plugin class 'Missing'"),
        (f"{HERE}:NoPlugin", "unknown-type", "has no plugin class 'NoPlugin'"),
        ("epp.plugin:Plugin", "unknown-type", "has no plugin class 'Plugin'"),
    ],
)
def test_a_type_that_gives_no_class_says_why(type_name: str, rule: str, message: str) -> None:
    with pytest.raises(registry.UnknownType) as caught:
        registry.find(type_name)
    assert caught.value.rule == rule
    assert message in str(caught.value)


def test_a_misspelt_type_gets_the_nearest_one() -> None:
    with pytest.raises(registry.UnknownType) as caught:
        registry.find("Queue-Scorer")
    assert caught.value.hint == "did you mean 'queue-scorer'?"


def test_no_type_is_both_stable_and_experimental_and_every_deprecated_one_is_known() -> None:
    assert not registry.STABLE_TYPES & registry.EXPERIMENTAL_TYPES
    assert registry.DEPRECATED_TYPES.keys() <= registry.STABLE_TYPES


def test_instances_that_refuse_are_named_and_the_others_made() -> None:
    specs = [
        registry.Spec("good", Plain, NoParams()),
        registry.Spec("refused", Strict, StrictParams("refused", [Limit(0.5)])),
        registry.Spec("broken", Strict, StrictParams("broken")),
    ]
    made, failed = registry.instances(specs)
    assert list(made) == ["good"]
    assert failed == [("refused", "fileName: no such file"), ("broken", "RuntimeError: it broke")]


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


def test_a_foreign_constructor_that_leaves_a_plugin_unusable_is_told() -> None:
    classes = (Leaves, Forgets, Bare)
    made, failed = registry.instances([registry.Spec(cls.__name__, cls, NoParams()) for cls in classes])
    assert made == {}
    assert failed[:2] == [
        ("Leaves", "SystemExit: 3"),
        ("Forgets", "class Forgets has a constructor that does not call super().__init__(name, params)"),
    ]
    assert failed[2].why.startswith("class Bare has consumes = Column('waiting_requests', int): write a tuple")


def test_kinds_are_extension_points_in_the_order_in_which_they_run() -> None:
    class Both(Scorer, Strict):
        pass

    assert [kind.__name__ for kind in registry.kinds(Both)] == ["Filter", "Scorer"]


@pytest.mark.parametrize("type_name", ["precise-prefix-cache-scorer", "precise-prefix-cache-producer"])
def test_what_needs_events_of_the_servers_is_refused_with_what_does_not(type_name: str) -> None:
    with pytest.raises(registry.UnknownType) as caught:
        registry.find(type_name)
    assert caught.value.rule == "unavailable-type"
    assert "approx-prefix-cache-producer" in caught.value.hint


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
    """A folder of plugins; forgotten afterwards with all that it brought."""
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
        registry.add_folder(str(folder))
    return str(caught.value)


def test_every_python_file_of_a_folder_brings_its_types(own: Path) -> None:
    (own / "b_warmth.py").write_text(WARMTH)
    (own / "a-cold.py").write_text(WARMTH.replace("warmth", "cold").replace("heat", "ice"))
    (own / "notes.txt").write_text("no Python")
    assert registry.add_folder(str(own)) == ["cold-scorer", "ice-scorer", "warmth-scorer", "heat-scorer"]
    assert registry.find("heat-scorer") is registry.find("warmth-scorer")
    assert registry.stability(registry.find("warmth-scorer")) == "external"


def test_files_may_share_what_stands_in_one_that_starts_with_an_underscore(own: Path) -> None:
    (own / "_shared.py").write_text("HEAT = 5\n")
    (own / "json.py").write_text("from ._shared import HEAT\n" + WARMTH + "    heat = HEAT\n")
    registry.add_folder(str(own))
    assert registry.find("warmth-scorer").heat == 5  # type: ignore[attr-defined]
    assert sys.modules["json"].__file__ != str(own / "json.py")


def test_no_compiled_files_are_left_or_read(own: Path) -> None:
    (own / "_shared.py").write_text("HEAT = 5\n")
    (own / "warmth.py").write_text("from ._shared import HEAT\n" + WARMTH)
    registry.add_folder(str(own))
    assert sorted(path.name for path in own.iterdir()) == ["_shared.py", "warmth.py"]


def test_two_folders_do_not_know_each_other(own: Path) -> None:
    other = own.parent / "other"
    other.mkdir()
    (own / "warmth.py").write_text(WARMTH)
    (other / "warmth.py").write_text(WARMTH.replace("warmth", "cold").replace("heat", "ice"))
    registry.add_folder(str(own))
    registry.add_folder(str(other))
    assert registry.find("warmth-scorer") is not registry.find("cold-scorer")


def test_a_file_that_cannot_be_imported_is_named_with_line_and_cause(own: Path) -> None:
    (own / "warmth.py").write_text(WARMTH + "\n1 / 0\n")
    assert refused(own) == f"plugin file {own}/warmth.py:10 cannot be imported: ZeroDivisionError: division by zero"


def test_its_line_is_named_where_the_folder_is_given_by_a_relative_path(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own / "warmth.py").write_text(WARMTH + "\n1 / 0\n")
    monkeypatch.chdir(own.parent)
    assert refused(Path("own")).startswith("plugin file own/warmth.py:10 cannot be imported")


@pytest.mark.parametrize("name", ["''", "' a'", "'a\\n'", "3"])
def test_a_type_that_no_configuration_can_name_is_refused(own: Path, name: str) -> None:
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
def test_whatever_a_file_does_at_its_import_is_told(own: Path, text: str, cause: str) -> None:
    (own / "warmth.py").write_text(text)
    assert f"{own}/warmth.py" in refused(own)
    assert cause in refused(own)


def test_a_type_that_exists_cannot_be_taken_by_a_file(own: Path) -> None:
    (own / "warmth.py").write_text(WARMTH.replace("warmth-scorer", "queue-scorer"))
    found = refused(own)
    assert f"{own}/warmth.py:3" in found
    assert (
        "plugin type 'queue-scorer' is registered by epp.plugins.scorers.queue_depth and by epp_plugin_path_" in found
    )


def test_two_classes_of_one_file_cannot_have_one_type(own: Path) -> None:
    (own / "warmth.py").write_text(WARMTH + WARMTH.replace("Warmth", "Other"))
    assert "plugin type 'warmth-scorer' is registered by" in refused(own)


def test_a_file_without_a_plugin_is_a_mistake_and_so_is_a_folder_without_a_file(own: Path) -> None:
    assert "has no Python file that registers one" in refused(own)
    (own / "warmth.py").write_text("class Warmth: pass\n")
    assert "warmth.py registers no plugin type; decorate a class with @plugin(...)" in refused(own)
