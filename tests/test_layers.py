"""Import rules and size limits of modules; `layers` defines the rules. Each rule must find a planted violation."""

import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from compiled.build import struct_faults
from tests.cases import cases
from tests.layers import (
    ARROWS_MAX,
    CLASS_LINES_MAX,
    EPP,
    FORKERS,
    FUNCTION_LINES_MAX,
    MODULE_LINES_MAX,
    MODULES,
    PACKAGES,
    PARAMETERS_MAX,
    ROOT,
    TEST_MODULE_LINES_MAX,
    WORKERS,
    WORKERS_ENTRIES_MAX,
    constructor_violations,
    cycle_violations,
    docstring_violations,
    entry_violations,
    forget,
    fork_violations,
    import_violations,
    imports,
    missing_violations,
    size_violations,
    sources,
    violations,
    within,
)


def test_every_module_keeps_the_rules() -> None:
    gc.disable()  # otherwise it walks two million nodes of syntax trees again and again: 6 of 8 seconds
    try:
        found = list(violations(sources(PACKAGES)))
    finally:
        forget()
        gc.enable()
    assert found == []


@cases(
    ("module", "source", "message"),
    [
        ("epp.decision.decide", "import time", "epp.decision.decide imports time, which is banned in epp: take `now`"),
        ("epp.decision.decide", "def f():\n    from os import path", "os, which is banned in epp: take the value as an argument"),
        ("epp.decision.decide", "from shm import table", "epp.decision.decide imports shm.table: epp knows only compiled, epp, msgspec"),
        ("epp.decision.decide", "import grpc", "epp.decision.decide imports grpc: epp knows only"),
        ("epp.decision.decide", "import uvloop", "epp.decision.decide imports uvloop: epp knows only"),
        ("epp.decision.decide", "from . import errors", "relative imports are banned; write the full path"),
        ("epp.decision.decide", "from epp.plugins.scorers import reported", "only epp.config names plugins; take it from"),
        ("epp.config.reader", "import yaml", "yaml, which is for epp.config.yaml_nodes"),
        ("epp.config.load", "import yaml", "yaml, which is for epp.config.yaml_nodes only: call those"),
        ("epp.request", "from epp.decision import decide", "epp.request imports epp.decision.decide, which is in a higher row: move"),
        ("epp.request", "from epp.config import load", "epp.config.load, which is in a higher row"),
        ("epp.unheard_of", "from epp import errors", "epp.unheard_of has no row in EPP in tests/layers.py: give"),
        ("epp.prefix.match", "from epp.protocol import codec", "are siblings; hand the value over in a plugin"),
        ("epp.plugins.scorers.a", "from epp.plugins.scorers.reported import X", "plugins never import each other"),
        ("epp.plugins.scorers.a", "import epp.plugins.pickers", "plugins never import each other; share by a Column"),
        ("epp.plugins.pickers.a", "import random\nrandom.shuffle([])", "random.shuffle: it is banned in epp; use"),
        ("epp.plugins.pickers.a", "from random import choice", "random.choice: it is banned in epp; use"),
        ("shm.table", "import asyncio", "asyncio, which is banned in shm: return at once"),
        ("shm.table", "import msgspec", "shm.table imports msgspec: shm knows only"),
        ("workers.worker.extproc.stream", "import loadtest.sim.main", "workers may not import loadtest; start it as a process"),
        ("workers.unheard_of.a", "from workers.host import options", "workers.unheard_of is missing in WORKERS"),
        ("workers.host.log", "from workers.transport import link", "workers.transport is above workers.host; move the code that both need"),
        ("workers.__main__", "from workers.process import parent", "it may import workers.cli only; move it there"),
        ("workers", "from workers.host import options", "it may import workers.cli only; move it there"),
        ("loadtest.load.driver", "from epp import decide", "it sees the picker from outside, and knows only epp.protocol"),
        ("loadtest.replay.run", "from workers.worker.extproc import stream", "loadtest knows of workers only what LABORATORY"),
    ],
)
def test_a_planted_import_is_reported_with_an_alternative(module: str, source: str, message: str) -> None:
    messages = import_violations(module, source)
    assert messages, source
    assert message in messages[0]


@cases(("above", "below"), list(itertools.pairwise(WORKERS)))
def test_a_package_of_workers_may_import_lower_packages_and_no_higher_ones(above: str, below: str) -> None:
    upwards = import_violations(f"workers.{below}.a", f"import workers.{above}.b")
    assert f"workers.{above} is above workers.{below}; move the code that both need into workers.{below} or below" in upwards[0]
    assert import_violations(f"workers.{above}.a", f"import workers.{below}.b") == []
    assert import_violations(f"workers.{above}.a", "from workers.host.options import Options") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("epp.plugins.pickers.a", "import random\ndef f(rng: random.Random): ..."),
        ("epp.plugins.scorers.a", "from epp.plugins.scorers import scaled\nfrom epp.prefix.match import MATCH"),
        ("epp.config.yaml_nodes", "import yaml"),
        ("epp.config.registry", "import epp.plugins"),
        ("epp.request.intake", "from epp.request import paths, renaming\nfrom epp.protocol import codec"),
        ("workers.process.parent", "def child():\n    import uvloop"),
        ("workers.worker.main", "import asyncio, grpc, epp.decision.decide, shm.table"),
        ("workers.__main__", "from workers.cli import main"),
        ("loadtest.load.driver", "import aiohttp\nfrom epp.protocol import codec"),
    ],
)
def test_imports_that_the_layers_allow_pass(module: str, source: str) -> None:
    assert import_violations(module, source) == []


def test_no_compiled_module_defines_a_struct() -> None:
    assert struct_faults() == []


def test_every_name_in_the_rows_is_a_module() -> None:
    listed = [f"epp.{part}" for names in EPP for part in sorted(names)] + [f"workers.{part}" for part in WORKERS]
    assert [name for name in listed if name not in MODULES] == []


@pytest.mark.parametrize("back", ["import epp.a", "def f():\n    from epp import a", "if TYPE_CHECKING:\n    from epp.a import A"])
def test_a_planted_cycle_is_reported_as_a_whole(back: str) -> None:
    texts = {"epp": "", "epp.a": "from epp import b", "epp.b": "from epp.c import C", "epp.c": back, "epp.d": "import epp.a"}
    (message,) = cycle_violations(texts)
    assert message.startswith("import cycle epp.a -> epp.b -> epp.c -> epp.a: move the code that they share into a lower module")


def test_an_imported_module_of_this_project_that_does_not_exist_is_reported() -> None:
    assert missing_violations({"epp.a": "import epp.b, shm, compiled.kernels.native, numpy"}) == [
        "epp.a imports epp.b, which does not exist: correct its name"
    ]


def test_modules_without_a_cycle_pass() -> None:
    assert cycle_violations({"epp.a": "import epp.b, epp.c", "epp.b": "import epp.c", "epp.c": "import os"}) == []


@pytest.mark.parametrize("source", ["import asyncio", "try:\n    from asyncio import events\nexcept ImportError:\n    x = 1"])
def test_a_planted_import_before_the_fork_is_reported_with_its_chain(source: str) -> None:
    texts = {
        "workers": "",
        "workers.process": "",
        "workers.process.parent": "from workers.process import instance",
        "workers.process.instance": "from workers.shared.bus import Bus",
        "workers.shared": "import concurrent.futures",
        "workers.shared.bus": source,
    }
    package, module = fork_violations(texts, ["workers.process.parent"])
    chain = "workers.process.parent -> workers.process.instance -> workers.shared"
    assert package.startswith(f"{chain} imports concurrent at module level, in a process that forks: import it under")
    assert module.startswith(f"{chain}.bus imports asyncio at module level")


@pytest.mark.parametrize(
    "source", ["def child():\n    import uvloop", "if TYPE_CHECKING:\n    import asyncio", "import structlog, aiohttp_like"]
)
def test_imports_in_a_child_or_for_annotations_pass(source: str) -> None:
    assert fork_violations({"workers.process.parent": source}, ["workers.process.parent"]) == []


def test_importing_the_modules_that_fork_starts_no_thread_and_imports_no_grpc() -> None:
    script = (
        f"import sys, {', '.join(FORKERS)}; import workers.process.fork\n"
        "assert workers.process.fork.threads() == 1, 'a thread was started at import'\n"
        "assert 'grpc' not in sys.modules, 'grpc was imported'\n"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # like the entry point
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, check=True, timeout=50)


def test_nothing_of_replicas_is_imported_without_a_store() -> None:
    script = (
        "import sys, workers.cli.serve, workers.supervisor.main, workers.worker.main\n"
        "found = [m for m in sys.modules if m.startswith(('workers.replicas', 'redis', 'hiredis'))]\n"
        "assert not found, f'imported: {found}'\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=50)


def test_workers_fits_on_one_page() -> None:
    assert entry_violations(ROOT / "workers") == []


def test_few_packages_of_workers_import_each_other() -> None:
    found = {
        (here, there)
        for module, source in sources(("workers",)).items()
        for target in imports(source)
        if within(target.target, ["workers"]) and "." in module
        if (here := module.split(".")[1]) != (there := target.target.split(".")[1]) and here != "__main__"
    }
    assert len(found) <= ARROWS_MAX, sorted(found)


def test_too_many_entries_of_workers_are_reported(tmp_path: Path) -> None:
    for number in range(WORKERS_ENTRIES_MAX):
        (tmp_path / f"module_{number:02}.py").touch()
    (tmp_path / "__pycache__").mkdir()
    assert entry_violations(tmp_path) == []
    (tmp_path / "one_more.py").touch()
    (message,) = entry_violations(tmp_path)
    assert f"has {WORKERS_ENTRIES_MAX + 1} entries, and at most {WORKERS_ENTRIES_MAX} are allowed: move" in message
    assert "move one into a package (module_00.py, " in message


@pytest.mark.parametrize(
    ("package", "docstring", "message"),
    [
        ("epp.plugins.pickers", "pickers", "epp.plugins.pickers has no docstring: say in its __init__.py what it is"),
        ("epp", "The domain of the picker.", "epp does not give the order of imports: write '... further right in this order: config > "),
        ("workers", "The processes: imports further right in this order: host > cli.", "write '... further right in this order: cli > "),
    ],
)
def test_a_planted_docstring_is_reported_with_the_missing_part(package: str, docstring: str, message: str) -> None:
    (messages,) = docstring_violations(package, f'"""{docstring}"""')
    assert message in messages


def lines(count: int, indent: str = "    ") -> str:
    return f"{indent}x = 1\n" * count


@pytest.mark.parametrize(
    ("generate", "most", "message"),
    [
        (lambda n: lines(n, ""), MODULE_LINES_MAX, "epp.a has 451 lines, and at most 450 are allowed: divide it by concern"),
        (lambda n: "class A:\n" + lines(n - 1), CLASS_LINES_MAX, "epp.a: class A has 301 lines, and at most 300"),
        (lambda n: "def f():\n" + lines(n - 1), FUNCTION_LINES_MAX, "epp.a: function f has 61 lines, and at most 60"),
        (lambda n: "async def f():\n" + lines(n - 1), FUNCTION_LINES_MAX, "epp.a: function f has 61 lines, and at most 60"),
    ],
)
def test_a_planted_size_is_reported_with_its_limit(generate: Callable[[int], str], most: int, message: str) -> None:
    assert size_violations("epp.a", generate(most)) == []
    (messages,) = size_violations("epp.a", generate(most + 1))
    assert message in messages


def test_modules_of_tests_have_size_limits_too() -> None:
    assert {"tests.test_layers", "tests.epp.flow.shards"} <= MODULES.keys()
    (message,) = size_violations("tests.epp.test_a", lines(TEST_MODULE_LINES_MAX + 1, ""))
    assert message.startswith("tests.epp.test_a has 501 lines, and at most 500 are allowed")


@pytest.mark.parametrize("module", ["loadtest.load.proto.ext_proc_pb2", "epp.config.schema"])
def test_generated_code_may_have_any_size(module: str) -> None:
    assert size_violations(module, lines(10 * MODULE_LINES_MAX, "")) == []


def test_a_planted_constructor_is_reported_with_its_number_of_parameters() -> None:
    def class_(count: int) -> str:
        names = [f"p{number}" for number in range(count)]
        return f"class A:\n    def __init__(self, {', '.join(names[:2])}, *, {', '.join(names[2:])}): ..."

    assert list(constructor_violations("epp.a", class_(PARAMETERS_MAX))) == []
    (message,) = constructor_violations("epp.a", class_(PARAMETERS_MAX + 1))
    assert message.startswith("epp.a: the constructor of A has 11 parameters, and at most 10 are allowed: put those")
