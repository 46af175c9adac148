"""Who may import whom, read from the source text of every module; each message names what to use instead.

`shm` knows bytes and `epp` the domain, neither knows the other; `workers` joins them; `loadtest` sees the picker from outside.
Inside `epp` the rows of `ROWS` go from low to high, and a module imports its own row and rows below.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("epp", "shm", "workers", "loadtest", "tests")

MAY_IMPORT = {  # of our own packages and of third parties; the standard library is open but for BANNED
    "shm": {"shm", "numpy", "posix_ipc"},
    "epp": {"epp", "msgspec", "numpy", "xxhash"},
    "loadtest": {"loadtest", "epp.protocol.codec", "epp.protocol.proto"},
}
ONLY_IN = {  # third-party modules that one place of `epp` keeps from the others
    "google": ("epp.protocol.codec", "epp.protocol.proto"),
    "yaml": ("epp.yaml_nodes",),
}
BANNED = {
    "epp": {
        "time": "take `now`",
        "asyncio": "await a future from the injected factory",
        "socket": "take bytes; `workers` opens sockets",
        "mmap": "take a reader of `shm` as a protocol",
        "os": "take the value as an argument",
        "signal": "signals end in `workers.parent`",
        "threading": "return a value; `workers` decides what runs where",
        "multiprocessing": "return a value; `workers` decides what runs where",
        "logging": "raise, or count; `workers` logs",
    },
    "shm": {"asyncio": "return at once; `workers` waits"},
}
ROWS = (
    {"errors", "data", "metrics", "findings", "quantities"},  # words
    {
        "request",
        "candidates",
        "client_headers",
        "decision",
        "flows",
        "latency",
        "model_rewrite",
        "multimodal",
        "pressure",
        "tokens",
    },  # values
    {"plugin", "plugin_class", "inflight_load"},  # extension points
    {"protocol", "flow", "prefix"},  # machines
    {"plugins"},  # leaves
    {"pipeline", "instrument", "guard", "isolation"},  # compiled form
    {"decide", "if_available", "paths"},  # the hot path
    {"explain"},  # what it came to
    {
        "config",
        "registry",
        "contracts",
        "assembly",
        "document",
        "flow_assembly",
        "stock",
        "parameters",
        "response_phase",
        "yaml_nodes",
        "advice",
        "schema",
    },  # start-up only
)
MACHINES, LEAVES, START_UP = 3, 4, 8
FORKERS = ("workers.parent", "workers.fork", "workers.restart")
NOT_BEFORE_A_FORK = {"asyncio", "uvloop", "grpc", "threading", "multiprocessing", "concurrent", "aiohttp"}


def module_names() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path


MODULES = dict(module_names())


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names; `from epp import errors` is `epp.errors` where that is a module. A relative import keeps its dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in MODULES else base


def run_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The import statements that importing the module executes: not those in functions, not those for type checkers."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.ClassDef)):
            checkers_only = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            yield from run_at_import([] if checkers_only else node.body)
            yield from run_at_import(getattr(node, "orelse", []) + getattr(node, "finalbody", []))
            for handler in getattr(node, "handlers", []):
                yield from run_at_import(handler.body)


def within(name: str, places: tuple[str, ...] | set[str]) -> bool:
    return any(name == place or name.startswith(place + ".") for place in places)


def package_violation(module: str, target: str) -> str | None:
    package, top = module.partition(".")[0], target.partition(".")[0]
    if target.startswith("."):
        return "relative imports are banned: write the full path"
    if instead := BANNED.get(package, {}).get(top):
        return f"{top} is banned in {package}: {instead}"
    if top in ONLY_IN and package == "epp":
        return None if within(module, ONLY_IN[top]) else f"{top} is for {' and '.join(ONLY_IN[top])} only: call those"
    open_to_all = top in sys.stdlib_module_names or (package == "loadtest" and top not in PACKAGES)
    if package in MAY_IMPORT and not open_to_all and not within(target, MAY_IMPORT[package]):
        return f"{package} may not import {target}: it knows {', '.join(sorted(MAY_IMPORT[package]))}"
    if package == "workers" and top in {"tests", "loadtest"}:
        return f"workers may not import {top}: start it as a process"
    return None


def row(name: str) -> int:
    part = name.split(".")[1]
    found = [number for number, names in enumerate(ROWS) if part in names]
    assert found, f"epp.{part} stands in no row of ROWS in tests/test_layers.py: give it one"
    return found[0]


def row_violation(module: str, target: str) -> str | None:
    if not module.startswith("epp.") or not target.startswith("epp."):
        return None
    here, there = row(module), row(target)
    folder, other = module.split(".")[1:3], target.split(".")[1:3]
    if there > here:
        return f"{target} stands above {module}: move what both need into a row below"
    if here == there == MACHINES and folder[0] != other[0]:
        return f"epp.{folder[0]} and epp.{other[0]} are siblings: hand the value over in a plugin or in `decide`"
    shared = target.count(".") == 2 or target.rpartition(".")[2].startswith("_")
    if here == there == LEAVES and (folder != other or not shared):
        return f"plugins never import each other ({target}): share by a Column or a Datum, or in the folder's __init__ or _module"
    if there == LEAVES and here not in (LEAVES, START_UP):
        return f"{module} names a plugin ({target}): take it from the pipeline"
    return None


def random_violations(module: str, tree: ast.AST) -> Iterator[str]:
    """`random.Random` is a type to annotate with; the module's own functions share one hidden generator."""
    if module.partition(".")[0] != "epp":
        return
    for node in ast.walk(tree):
        named: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module == "random":
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "random":
            named = [node.attr]
        yield from (f"random.{name} is banned in epp: use `services.rng`" for name in named if name != "Random")


def violations(module: str, source: str) -> list[str]:
    tree = ast.parse(source)
    found = [rule(module, target) for target in imported(tree) for rule in (package_violation, row_violation)]
    found += random_violations(module, tree)
    if module in FORKERS:
        early = {name.partition(".")[0] for node in run_at_import(tree.body) for name in imported(node)}
        found += [
            f"{module} imports {name} at module level: import it in the child, in the function that needs it"
            for name in sorted(early & NOT_BEFORE_A_FORK)
        ]
    return [message for message in found if message]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_its_layer_may(module: str) -> None:
    assert violations(module, MODULES[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("epp.decide", "import time", "time is banned in epp: take `now`"),
        ("epp.decide", "def f():\n    from os import path", "os is banned in epp: take the value as an argument"),
        ("epp.decide", "from shm import table", "epp may not import shm"),
        ("epp.decide", "import grpc", "epp may not import grpc"),
        ("epp.decide", "import uvloop", "epp may not import uvloop"),
        ("epp.decide", "from . import errors", "relative imports are banned"),
        ("epp.decide", "from epp.plugins.scorers import queue_depth", "epp.decide names a plugin"),
        ("epp.protocol.stream", "from google.protobuf import message", "google is for epp.protocol.codec"),
        ("epp.config", "import yaml", "yaml is for epp.yaml_nodes only"),
        ("epp.request", "from epp import decide", "epp.decide stands above epp.request"),
        ("epp.prefix.match", "from epp.protocol import codec", "are siblings"),
        ("epp.plugins.scorers.a", "from epp.plugins.scorers.queue_depth import X", "plugins never import each other"),
        ("epp.plugins.scorers.a", "import epp.plugins.pickers", "plugins never import each other"),
        ("epp.plugins.pickers.a", "import random\nrandom.shuffle([])", "random.shuffle is banned in epp"),
        ("epp.plugins.pickers.a", "from random import choice", "random.choice is banned in epp"),
        ("shm.table", "import asyncio", "asyncio is banned in shm"),
        ("shm.table", "import msgspec", "shm may not import msgspec"),
        ("workers.server", "import loadtest.sim", "start it as a process"),
        (
            "workers.parent",
            "try:\n    import uvloop\nexcept ImportError:\n    import asyncio",
            "imports asyncio at module",
        ),
        ("loadtest.driver", "from epp import decide", "loadtest may not import epp.decide"),
    ],
)
def test_a_planted_violation_is_named_with_what_to_use_instead(module: str, source: str, message: str) -> None:
    found = violations(module, source)
    assert found, source
    assert message in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("epp.plugins.pickers.a", "import random\ndef f(rng: random.Random): ..."),
        ("epp.plugins.scorers.a", "from epp.plugins.scorers import scaled\nfrom epp.prefix.match import MATCH"),
        ("epp.protocol.codec", "from google.protobuf import message"),
        ("epp.registry", "import epp.plugins"),
        ("workers.parent", "def child():\n    import uvloop"),
        ("workers.worker", "import asyncio, grpc, epp.decide, shm.table"),
        ("loadtest.driver", "import aiohttp\nfrom epp.protocol import codec"),
    ],
)
def test_what_the_layers_allow_is_let_through(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_importing_what_forks_starts_no_thread_and_brings_no_grpc() -> None:
    script = (
        f"import sys, {', '.join(FORKERS)}; import workers.fork\n"
        "assert workers.fork.threads() == 1, 'a thread was started at import'\n"
        "assert 'grpc' not in sys.modules, 'grpc was imported'\n"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # as the entry point sets it
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, check=True, timeout=50)
