"""Defines the rules of `test_layers`, as functions from source text to messages. Each message names the module, the rule and the fix.

`shm` knows bytes and `epp` knows the domain; neither knows the other. `workers` joins them. `loadtest` runs beside the picker; of
`workers` it knows what is named here.
The rows of `EPP` go from low to high; a module may import its row and lower rows. The packages of `WORKERS` go from high to low; a
module may import its package and lower packages.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PICKER = ("compiled", "epp", "shm", "workers", "loadtest")
PACKAGES = (*PICKER, "release", "tests")

MAY_IMPORT = {  # of our packages and of third parties; the standard library is allowed except BANNED
    "compiled": {"compiled", "mypy", "mypyc", "numpy"},
    "shm": {"compiled", "shm", "numpy", "posix_ipc"},
    "epp": {"compiled", "epp", "msgspec", "numpy", "xxhash"},
    "loadtest": {"loadtest", "compiled", "epp", "shm", "workers"},  # of workers: LABORATORY
    "release": {"release", "compiled", "hatchling", "packaging", "workers.host"},
}
ONLY_IN = {  # third-party modules that only these modules of `epp` may import
    "cel": ("epp.plugins.reporters",),
    "yaml": ("epp.config.yaml_nodes",),
}
# They see the picker as Envoy and model servers do: of the project they know the codec.
FROM_OUTSIDE = ("loadtest.sim", "loadtest.load")
LABORATORY = {  # what `loadtest` may import of `workers`
    "workers.cli",  # what commands have in common
    "workers.host",
    "workers.shared.recording",
    "workers.process.unit_bytes",  # sizes of shared memory
    # The decision code that replay runs:
    "workers.shared.index_limits",
    "workers.worker.extproc.shedding",
    "workers.worker.flow.flow_control",
    "workers.worker.flow.probe",
    "workers.shared.bus",
    "workers.worker.services",
}
BANNED = {
    "epp": {
        "time": "take `now`",
        "asyncio": "await a future from the injected factory",
        "socket": "take bytes; `workers` opens sockets",
        "mmap": "take a reader of `shm` as a protocol",
        "os": "take the value as an argument",
        "signal": "signals end in `workers.process.signals`",
        "threading": "return a value; `workers` decides what runs where",
        "multiprocessing": "return a value; `workers` decides what runs where",
        "logging": "raise, or count; `workers` logs",
    },
    "shm": {"asyncio": "return at once; `workers` waits"},
}
PARAMETERS = "epp.plugins._parameters"  # of compiled plugins of all kinds

EPP = (  # packages and modules; a module that is not named has the row of its package
    {"errors", "data", "metrics", "quantities"},  # words
    {"candidates", "decision.decision", "decision.tryout", "endpoints", "learning", "recording", "request"},  # values
    {"plugin", "points", "decision.profile"},  # extension points
    {"protocol", "flow", "prefix"},  # machines
    {"plugins"},  # leaves
    {"decision.pipeline", "decision.response_needs", "points.guard", "points.instrument", "points.isolation"},  # compiled form
    {"decision", "request.intake", "request.paths", "request.pool_choice", "request.renaming", "request.tenants"},  # the hot path
    {"decision.explain", "decision.receipt"},  # explanations of decisions
    {"config", "testing"},  # start-up, and tests of plugins
)
MACHINES, LEAVES, START_UP = 3, 4, 8
WORKERS = (  # from high to low; a package in a package has a row of its own
    "cli",
    "supervisor",
    "supervisor.kv_events",
    "supervisor.kube",
    "supervisor.pages",
    "supervisor.endpoints",
    "worker",
    "worker.extproc",
    "worker.flow",
    "worker.telemetry",
    "process",
    "replicas",
    "shared",
    "transport",
    "host",
)
WORKERS_ENTRIES_MAX = 11
ARROWS_MAX = 24  # between the packages of `workers`

FORKERS = (  # modules that run in the parent; it imports the last one in a function, before it forks
    "workers.process.parent",
    "workers.process.fork",
    "workers.process.restart",
    "workers.process.certificates",
)
NOT_BEFORE_A_FORK = frozenset({"asyncio", "uvloop", "grpc", "threading", "multiprocessing", "concurrent", "aiohttp"})

MODULE_LINES_MAX, CLASS_LINES_MAX, FUNCTION_LINES_MAX = 450, 300, 60
TEST_MODULE_LINES_MAX = 500
PARAMETERS_MAX = 10  # of a constructor
ANY_SIZE = ("loadtest.load.proto", "epp.config.schema")  # generated, and one table

BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # the fields of statements that have statements

ORDER = re.compile(r"further right in this order: ([^.]+)\.")


class Import(NamedTuple):
    """One import. `target`: the imported module. `early`: whether it runs at module level, and not only for type checkers."""

    target: str
    early: bool


def module_names() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path


MODULES = dict(module_names())


def sources(packages: tuple[str, ...]) -> dict[str, str]:
    """Returns module -> source text, for all modules of these packages."""
    return {module: path.read_text() for module, path in MODULES.items() if within(module, packages)}


def within(name: str, places: Iterable[str]) -> bool:
    return any(name == place or name.startswith(place + ".") for place in places)


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def statements(source: str) -> tuple[ast.stmt | ast.ExceptHandler | ast.match_case, ...]:
    """Returns all statements of a module, those in functions and classes, too. They are a fifth of its nodes."""
    found: list[ast.stmt | ast.ExceptHandler | ast.match_case] = [*parsed(source).body]
    for node in found:  # which grows
        for block in BLOCKS:
            found += getattr(node, block, ())
    return tuple(found)


def forget() -> None:
    """Frees the syntax trees: each later garbage collection of this process would walk them."""
    parsed.cache_clear()
    statements.cache_clear()


@cache
def imports(source: str, *, known: frozenset[str] = frozenset(MODULES)) -> tuple[Import, ...]:
    """Finds the imports of a module. `from epp import errors` gives `epp.errors` if that is one of the `known` modules.

    A relative import keeps its dots.
    """
    early = set(run_at_import(parsed(source).body))
    return tuple(
        Import(target, node in early)
        for node in statements(source)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for target in targets(node, known)
    )


def targets(node: ast.Import | ast.ImportFrom, known: frozenset[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = "." * node.level + (node.module or "")
    return [full if (full := f"{base}.{alias.name}") in known else base for alias in node.names]


def run_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the import statements that run when the module is imported: not those in functions, and not those for type checkers."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.ClassDef)):
            checkers_only = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            yield from run_at_import([] if checkers_only else node.body)
            yield from run_at_import(getattr(node, "orelse", []) + getattr(node, "finalbody", []))
            for handler in getattr(node, "handlers", []):
                yield from run_at_import(handler.body)


def violations(texts: Mapping[str, str]) -> Iterator[str]:
    """Yields all violations of these modules: what one shows alone, and what they show together."""
    for module, source in texts.items():
        yield from import_violations(module, source)
        yield from size_violations(module, source)
        if within(module, PICKER):
            yield from constructor_violations(module, source)
            if MODULES[module].name == "__init__.py":
                yield from docstring_violations(module, source)
    yield from missing_violations(texts)
    products = {module: source for module, source in texts.items() if not within(module, ["tests"])}
    yield from cycle_violations(products)
    yield from fork_violations(products)


def missing_violations(texts: Mapping[str, str]) -> list[str]:
    """Returns a message for each import of a module of this project that does not exist."""
    known = {*MODULES, "compiled.kernels.native"}  # the latter is made of C
    return [
        f"{module} imports {target}, which does not exist: correct its name"
        for module, source in texts.items()
        for target, _ in imports(source)
        if within(target, PACKAGES) and target not in known and not (ROOT / target.replace(".", "/")).is_dir()
    ]


def import_violations(module: str, source: str) -> list[str]:
    """Returns the violations that one module alone shows."""
    rules = (package_violation, row_violation, direction_violation)
    messages = [rule(module, target) for target, _ in imports(source) for rule in rules]
    return [*(message for message in messages if message), *random_violations(module, source)]


def package_violation(module: str, target: str) -> str | None:
    package, top = module.partition(".")[0], target.partition(".")[0]
    if target.startswith("."):
        return f"{module} imports {target}: relative imports are banned; write the full path"
    if instead := BANNED.get(package, {}).get(top):
        return f"{module} imports {top}, which is banned in {package}: {instead}"
    if top in ONLY_IN and package == "epp":
        if within(module, ONLY_IN[top]):
            return None
        return f"{module} imports {top}, which is for {' and '.join(ONLY_IN[top])} only: call those"
    open_to_all = top in sys.stdlib_module_names or (package == "loadtest" and top not in PACKAGES)
    if package in MAY_IMPORT and not open_to_all and not within(target, MAY_IMPORT[package]):
        allowed = ", ".join(sorted(MAY_IMPORT[package]))
        return f"{module} imports {target}: {package} knows only {allowed}; take it as an argument, or move the code"
    if package in ("compiled", "epp", "shm", "workers") and top in {"tests", "loadtest"}:
        return f"{module} imports {target}: {package} may not import {top}; start it as a process"
    outside = within(module, FROM_OUTSIDE) and not module.endswith(".command")
    if outside and top in PICKER and not within(target, ("epp.protocol", *FROM_OUTSIDE)):
        return f"{module} imports {target}: it sees the picker from outside, and knows only epp.protocol"
    if package == "loadtest" and top == "workers" and not within(target, LABORATORY):
        return f"{module} imports {target}: loadtest knows of workers only what LABORATORY in tests/layers.py names"
    return None


def row_violation(module: str, target: str) -> str | None:
    """Returns a message if a module of `epp` imports from a row above its own."""
    if not (module.startswith("epp.") and target.startswith("epp.")):
        return None
    folder, other = module.split(".")[1:3], target.split(".")[1:3]
    for parts in (folder, other):
        if row(parts) is None:
            return f"epp.{parts[0]} has no row in EPP in tests/layers.py: give it one"
    here, there = row(folder) or 0, row(other) or 0
    if there > here:
        return f"{module} imports {target}, which is in a higher row: move the code that both need into a lower row"
    if here == there == MACHINES and folder[0] != other[0]:
        return f"{module} imports {target}: epp.{folder[0]} and epp.{other[0]} are siblings; hand the value over in a plugin or in `decide`"
    shared = target.count(".") == 2 or target.rpartition(".")[2].startswith("_")
    if here == there == LEAVES and target != PARAMETERS and (folder != other or not shared):
        return (
            f"{module} imports {target}: plugins never import each other; "
            "share by a Column or a Datum, or in the folder's __init__ or _module"
        )
    if there == LEAVES and here not in (LEAVES, START_UP):
        return f"{module} imports {target}: only epp.config names plugins; take it from the pipeline"
    return None


def row(parts: Sequence[str]) -> int | None:
    """Returns the row of a module of `epp`: its own, else that of its package."""
    found = [number for name in (".".join(parts), parts[0]) for number, names in enumerate(EPP) if name in names]
    return found[0] if found else None


def direction_violation(module: str, target: str) -> str | None:
    """Returns a message if a package of `workers` imports a package above it."""
    if not (within(module, ["workers"]) and within(target, ["workers"])):
        return None
    here, there = room(module), room(target)
    if here in ("", "__main__"):
        return None if there == "cli" else f"{module} imports {target}: it may import workers.cli only; move it there"
    for part in (here, there):
        if part not in WORKERS:
            return f"workers.{part} is missing in WORKERS in tests/layers.py: add it"
    if WORKERS.index(there) < WORKERS.index(here):
        return (
            f"{module} imports {target}: workers.{there} is above workers.{here}; "
            f"move the code that both need into workers.{here} or below, or take it as an argument"
        )
    return None


def room(module: str) -> str:
    """Returns the row of a module of `workers`: its package in a package if WORKERS names that, else its package."""
    parts = module.split(".")[1:3]
    return inner if (inner := ".".join(parts)) in WORKERS else parts[0] if parts else ""


def random_violations(module: str, source: str) -> Iterator[str]:
    """Yields a message for each use of the functions of `random` in `epp`, because they share one hidden generator.

    Only the type `random.Random` is allowed, for annotations.
    """
    if module.partition(".")[0] != "epp" or "random" not in source:
        return
    for node in ast.walk(parsed(source)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module == "random":
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "random":
            names = [node.attr]
        yield from (f"{module} uses random.{name}: it is banned in epp; use `services.rng`" for name in names if name != "Random")


def cycle_violations(texts: Mapping[str, str]) -> list[str]:
    """Returns a message for each import cycle between these modules. Imports in functions and for type checkers count, too."""
    known = frozenset(texts)
    graph = {name: {i.target for i in imports(text, known=known)} & known - {name} for name, text in texts.items()}
    messages, seen = [], set[str]()
    for module in sorted(graph):
        cycle = None if module in seen else shortest_path(graph, module, module)
        if cycle:
            seen.update(cycle)
            messages.append(
                f"import cycle {' -> '.join(cycle)}: move the code that they share into a lower module, or take a Protocol as argument"
            )
    return messages


def shortest_path(graph: Mapping[str, set[str]], start: str, end: str) -> list[str] | None:
    """Returns the shortest path from `start` to `end` with at least one edge; None if there is none. The path includes both."""
    paths, reached = [[start]], set[str]()
    for path in paths:
        for following in sorted(graph[path[-1]] - reached):
            if following == end:
                return [*path, end]
            reached.add(following)
            paths.append([*path, following])
    return None


def fork_violations(texts: Mapping[str, str], forkers: Iterable[str] = FORKERS) -> list[str]:
    """Returns a message for each import, before a fork, of a library that starts threads or event loops.

    Imports inside third-party code do not count.
    """
    known = frozenset(texts)
    paths, reached = [[forker] for forker in forkers], set(forkers)
    messages = []
    for path in paths:
        early = [i.target for i in imports(texts[path[-1]], known=known) if i.early]
        messages += [
            f"{' -> '.join(path)} imports {library} at module level, in a process that forks: "
            "import it under TYPE_CHECKING for annotations, else in the function that a child calls"
            for library in sorted({target.partition(".")[0] for target in early} & NOT_BEFORE_A_FORK)
        ]
        run = {name for target in (path[-1], *early) for name in (target, *parents(target))}
        for name in sorted(run & known - reached):
            reached.add(name)
            paths.append([*path, name])
    return messages


def parents(module: str) -> Iterator[str]:
    """The packages that Python imports before a module."""
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def entry_violations(folder: Path) -> list[str]:
    """Returns a message if `workers/` has more files and folders than fit on one page."""
    entries = sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")
    if len(entries) <= WORKERS_ENTRIES_MAX:
        return []
    return [
        f"{folder.name}/ has {len(entries)} entries, and at most {WORKERS_ENTRIES_MAX} are allowed: "
        f"move one into a package ({', '.join(entries)})"
    ]


def docstring_violations(package: str, source: str) -> list[str]:
    """Checks the docstring of a package. Those of `epp` and `workers` must also give the order of imports of their packages."""
    text = ast.get_docstring(parsed(source)) or ""
    if len(text.split()) < 3:
        return [f"{package} has no docstring: say in its __init__.py what it is"]
    if package not in ("epp", "workers"):
        return []
    told = ORDER.search(text)
    order = epp_order() if package == "epp" else " > ".join(name for name in WORKERS if "." not in name)
    if told is None or " ".join(told[1].split()) != order:
        return [f"{package} does not give the order of imports: write '... further right in this order: {order}.' into its docstring"]
    return []


def epp_order() -> str:
    """Returns the packages of the rows of EPP from high to low, those of a row in alphabetical order."""
    packages = {name for name in MODULES if name.count(".") == 1 and MODULES[name].name == "__init__.py"}
    rows = [sorted(name for name in row if f"epp.{name}" in packages) for row in reversed(EPP)]
    return " > ".join(", ".join(names) for names in rows if names)


def size_violations(module: str, source: str) -> list[str]:
    """Returns a message for the module, and for each class and function in it, that is too long."""
    if within(module, ANY_SIZE):
        return []
    messages = []
    most = TEST_MODULE_LINES_MAX if within(module, ("tests",)) else MODULE_LINES_MAX
    if (lines := len(source.splitlines())) > most:
        messages.append(f"{module} has {lines} lines, and at most {most} are allowed: divide it by concern")
    for node in statements(source):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            kind, most = ("class", CLASS_LINES_MAX) if isinstance(node, ast.ClassDef) else ("function", FUNCTION_LINES_MAX)
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > most:
                messages.append(f"{module}: {kind} {node.name} has {lines} lines, and at most {most} are allowed: divide it")
    return messages


def constructor_violations(module: str, source: str) -> Iterator[str]:
    """Yields a message for each constructor that takes too many values."""
    for node in statements(source):
        for method in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                taken = method.args
                count = len([*taken.posonlyargs, *taken.args, *taken.kwonlyargs]) - 1
                if count > PARAMETERS_MAX:
                    yield (
                        f"{module}: the constructor of {node.name} has {count} parameters, and at most {PARAMETERS_MAX} "
                        "are allowed: put those that belong together into a value with a name"
                    )
