"""Parses label selectors as Kubernetes writes them: `a=b, c in (d, e), !f, g notin (h), i > 3`. Matches labels against them.

The API server gets the text and selects. The picker then checks every object that the server sends against the same selector.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

NAME_MAX: Final = 63
PREFIX_MAX: Final = 253
REQUIREMENTS_MAX: Final = 64
VALUES_MAX: Final = 256

_TOKEN = re.compile(r"\s*(==|!=|[=!,()<>]|[A-Za-z0-9][-A-Za-z0-9_./]*)")
_NAME = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?")
_PREFIX = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
_INTEGER = re.compile(r"[0-9]{1,18}")
_SIGNS = frozenset("=!,()<>") | {"==", "!="}


class Requirement(NamedTuple):
    """One condition of a selector. `operator` is in, notin, exists, !, > or <."""

    key: str
    operator: str
    values: frozenset[str] = frozenset()

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Whether an object with these labels meets the condition."""
        value = labels.get(self.key)
        match self.operator:
            case "in":
                return value in self.values
            case "notin":
                return value not in self.values
            case "exists":
                return value is not None
            case "!":
                return value is None
        (limit,) = self.values
        if value is None or not _INTEGER.fullmatch(value):
            return False
        return int(value) > int(limit) if self.operator == ">" else int(value) < int(limit)


class Selector(NamedTuple):
    """A selector. All requirements must hold, so a selector without any selects everything. `text`: its form for the API server."""

    text: str = ""
    requirements: tuple[Requirement, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether an object with these labels is selected."""
        return all(requirement.holds(labels) for requirement in self.requirements)


def of_labels(labels: Mapping[str, str]) -> Selector:
    """Returns the selector for `matchLabels`: each label must have the given value."""
    text = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    return Selector(text, tuple(Requirement(key, "in", frozenset((value,))) for key, value in sorted(labels.items())))


def parse(text: str) -> Selector:
    """Parses the text of a selector. Raises ValueError with what is wrong and where."""
    tokens = _Tokens(text)
    requirements = []
    while tokens.next is not None:
        requirements.append(_requirement(tokens))
        if tokens.next is None:
            break
        tokens.expect(",")
        if tokens.next is None:
            raise ValueError(f"'{text}' ends with a comma; remove it")
    if len(requirements) > REQUIREMENTS_MAX:
        raise ValueError(f"'{text[:64]}...' has more than {REQUIREMENTS_MAX} requirements")
    return Selector(text.strip(), tuple(requirements))


class _Tokens:
    """Gives the tokens of a selector one by one. `next`: the next token; None at the end."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._split()
        self.next: str | None = next(self._tokens)

    def take(self) -> str:
        taken, self.next = self.next, next(self._tokens)
        if taken is None:
            raise ValueError(f"'{self._text}' ends too early; write a selector such as 'app=vllm, tier in (a, b), !canary'")
        return taken

    def expect(self, sign: str) -> None:
        if (token := self.next) != sign:
            raise ValueError(f"'{self._text}': '{sign}' is expected, not '{token or 'the end'}'")
        self.take()

    def _split(self) -> Iterator[str | None]:
        at = 0
        while self._text[at:].strip():
            match = _TOKEN.match(self._text, at)
            if match is None:
                raise ValueError(f"'{self._text}': '{self._text[at:].strip()[0]}' has no meaning in a selector")
            yield match[1]
            at = match.end()
        while True:
            yield None


def _requirement(tokens: _Tokens) -> Requirement:
    if tokens.next == "!":
        tokens.take()
        return Requirement(_key(tokens.take()), "!")
    key = _key(tokens.take())
    sign = tokens.next
    if sign is None or sign == ",":
        return Requirement(key, "exists")
    tokens.take()
    if sign in ("in", "notin"):
        return Requirement(key, sign, _values(tokens))
    if sign in (">", "<"):
        limit = tokens.take()
        if not _INTEGER.fullmatch(limit):
            raise ValueError(f"'{key} {sign} {limit}': only integers can be compared")
        return Requirement(key, sign, frozenset((limit,)))
    operators = {"=": "in", "==": "in", "!=": "notin"}
    if sign not in operators:
        raise ValueError(f"'{sign}' after '{key}' is not an operator; use =, ==, !=, in, notin, > or <")
    return Requirement(key, operators[sign], frozenset((_value(tokens),)))


def _values(tokens: _Tokens) -> frozenset[str]:
    tokens.expect("(")
    values = {_value(tokens)}
    while tokens.next == ",":
        tokens.take()
        values.add(_value(tokens))
    tokens.expect(")")
    if len(values) > VALUES_MAX:
        raise ValueError(f"a requirement has more than {VALUES_MAX} values")
    return frozenset(values)


def _value(tokens: _Tokens) -> str:
    """Takes the next value. Returns "" if a comma, a bracket or the end comes next."""
    if tokens.next in (None, ",", ")"):
        return ""
    value = tokens.take()
    if len(value) > NAME_MAX or not _NAME.fullmatch(value):
        raise ValueError(f"'{value[:PREFIX_MAX]}' is not a label value: use up to {NAME_MAX} letters, digits, '-', '_' and '.'")
    return value


def _key(text: str) -> str:
    prefix, slash, name = text.rpartition("/")
    good_prefix = not slash or (len(prefix) <= PREFIX_MAX and _PREFIX.fullmatch(prefix))
    if text in _SIGNS or not good_prefix or len(name) > NAME_MAX or not _NAME.fullmatch(name):
        raise ValueError(f"'{text[:PREFIX_MAX]}' is not a label key: write a key such as app or example.com/app")
    return text
