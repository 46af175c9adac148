"""The event of a log line is one fixed text: counts, names and reasons are fields, so that lines of one event can be found and counted."""

import ast
from collections.abc import Iterator

from tests.cases import cases
from tests.layers import sources

LEVELS = {"debug", "info", "warning", "error", "critical", "exception"}
REPORTERS = {"report", "once", "warn", "log", "on_failure", "on_accept_failure", "Rarely"}  # they pass an event on to a logger
SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)


def violations(module: str, source: str) -> Iterator[str]:
    """The calls of loggers, and of functions that pass an event on to one, with an event that is not one fixed text."""
    for scope in ast.walk(ast.parse(source)):
        if not isinstance(scope, SCOPES):
            continue
        assigned = {
            target.id: node.value
            for node in own(scope)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in own(scope):
            if isinstance(node, ast.Call) and (reports := reporter(node.func, assigned)):
                bad = next((argument for argument in node.args if not fixed(argument, assigned, reports)), None)
                if bad is not None:
                    yield (
                        f"{module}:{node.lineno}: the event is {ast.unparse(bad)[:80]}: "
                        "write one fixed text, and give counts, names and reasons as fields"
                    )


def own(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope without those of the functions in it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, SCOPES):
            yield child
            yield from own(child)


def reporter(function: ast.expr, assigned: dict[str, ast.expr]) -> str:
    """ "logger", "reporter", or "" for other functions. A local name stands for what is assigned to it."""
    if isinstance(function, ast.Name) and function.id in assigned:
        value = assigned[function.id]
        choices = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
        return "logger" if any(isinstance(choice, ast.Attribute) and is_level(choice) for choice in choices) else ""
    if isinstance(function, ast.Attribute) and is_level(function):
        return "logger"
    if ast.unparse(function) in ("math.log", "np.log"):
        return ""
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return "reporter" if name.removeprefix("_") in REPORTERS else ""


def is_level(function: ast.Attribute) -> bool:
    return function.attr in LEVELS and ast.unparse(function.value).rpartition(".")[2] in ("log", "_log", "logger")


def fixed(argument: ast.expr, assigned: dict[str, ast.expr], reports: str) -> bool:
    """Whether an argument is a fixed text. Functions that pass an event on also take other things: plugins, exceptions."""
    if isinstance(argument, ast.Name) and argument.id in assigned:
        return fixed(assigned[argument.id], {}, reports)
    if isinstance(argument, ast.IfExp):
        return fixed(argument.body, assigned, reports) and fixed(argument.orelse, assigned, reports)
    if isinstance(argument, ast.Constant):
        return True
    if isinstance(argument, ast.Name) and (argument.id == "event" or argument.id.isupper()):
        return True  # an event that was passed on, or a constant
    if isinstance(argument, ast.Call) and ast.unparse(argument.func) == "kind.event":
        return True  # an enumeration has one event per member
    formatted = isinstance(argument, (ast.JoinedStr, ast.BinOp)) or (
        isinstance(argument, ast.Call) and ast.unparse(argument.func).rpartition(".")[2] in ("format", "join", "str")
    )
    return reports == "reporter" and not formatted


@cases(
    "line",
    [
        'log.warning(f"{count} endpoints wait")',
        'self._log.info("endpoint " + name)',
        'log.error("no endpoint %s" % name)',
        'log.error("no endpoint {}".format(name))',
        "log.warning(text)",
        "log.warning(str(failure))",
        'self._report(f"{failure}; the picker tries again")',
        'report("; ".join(reasons))',
        'services.warn(self, f"{self.name} has no value")',
        'text = f"{count} faults"\nself._once(text)',
        'write = log.info if good else log.error\nwrite(f"exit {code}")',
        'self._log(log.error, f"certificate of {name}")',
        'Rarely(f"faults of {name}", log.warning)',
        'log.info("good" if good else f"bad: {why}")',
    ],
)
def test_an_event_that_contains_a_value_is_found(line: str) -> None:
    (message,) = violations("module", line)
    assert message.startswith(f"module:{len(line.splitlines())}: the event is ")


@cases(
    "line",
    [
        'log.warning("endpoints wait", count=count, reason=f"{free} are free")',
        'log.info("good" if good else "bad")',
        "log.warning(BLOCKS, ms=3)",
        "def report(event, **fields):\n    log.warning(event, **fields)",
        'write = log.info if good else log.error\nwrite("ended", code=code)',
        'self._report("workers keep the last document", document=name)',
        "self._report(name, problem)",
        "math.log(one / other)",
        'services.warn(self, "no value", key=self.key)',
        'print(f"{count} endpoints")',
    ],
)
def test_a_fixed_event_with_fields_passes(line: str) -> None:
    assert list(violations("module", line)) == []


def test_every_event_in_the_tree_is_one_fixed_text() -> None:
    texts = {module: text for module, text in sources(("epp", "workers")).items() if not module.startswith("epp.config.")}
    # `epp.config` logs nothing; its function `warn` collects findings for `epp config check`.
    assert [message for module, source in texts.items() for message in violations(module, source)] == []
