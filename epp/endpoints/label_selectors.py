"""Implements label selectors of Kubernetes: their rules, and their form as one text. Names the label of roles."""

import re
from collections.abc import Callable, Mapping
from typing import Final, Literal

ROLE_LABEL: Final = "llm-d.ai/role"  # the stages of disaggregated serving that an endpoint computes
PREFILL_ROLES: Final = frozenset(("prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode"))
NAME_MAX = VALUE_MAX = 63
PREFIX_MAX = 253

_NAME = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?")
_PREFIX = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
_TERM = re.compile(  # one term of a selector that is written as one text
    r"\s*(?:(?P<absent>!)\s*(?P<no>[^\s,!=()]+)"
    r"|(?P<key>[^\s,!=()<>]+)\s*(?:(?P<sign>==?|!=)\s*(?P<value>[^\s,!=()<>]*)|(?P<set>in|notin)\s*\((?P<values>[^()]*)\))?)\s*"
)
_NAME_RULE = f"1 to {NAME_MAX} letters, digits, '-', '_' and '.', with a letter or digit at both ends"
_PREFIX_RULE = f"a lower-case DNS name of at most {PREFIX_MAX} characters"

Operator = Literal["In", "NotIn", "Exists", "DoesNotExist"]


def parsed(text: str) -> Callable[[Mapping[str, str]], bool]:
    """Parses a selector in the text form of Kubernetes: `a=b, c!=d, e in (f, g), h notin (i), j, !k`.

    Returns a function that says whether labels match. All terms must hold. Raises ValueError with the wrong term.
    """
    rules: list[tuple[str, Operator, frozenset[str]]] = []
    at = 0
    while True:
        term = _TERM.match(text, at)
        if term is None or (term.end() < len(text) and text[term.end()] != ","):
            raise ValueError(f"'{text[at:]}' does not start with a term such as 'a=b', 'a!=b', 'a in (b, c)', 'a' or '!a'")
        rules.append(_rule(term))
        at = term.end() + 1
        if term.end() == len(text):
            break
    return lambda labels: all(holds(labels.get(key), operator, values) for key, operator, values in rules)


def _rule(term: re.Match[str]) -> tuple[str, Operator, frozenset[str]]:
    key = term["no"] or term["key"]
    values = [term["value"]] if term["sign"] else [v.strip() for v in term["values"].split(",")] if term["set"] else []
    operator: Operator = "DoesNotExist" if term["absent"] else "Exists"
    if values:
        operator = "NotIn" if term["sign"] == "!=" or term["set"] == "notin" else "In"
    fault = key_fault(key) or next(filter(None, map(value_fault, values)), "")
    if fault:
        raise ValueError(fault)
    return key, operator, frozenset(values)


def holds(value: str | None, operator: str, values: frozenset[str]) -> bool:
    """Returns whether a label with this value meets a requirement. None: there is no such label; then NotIn holds."""
    if operator == "In":
        return value in values
    if operator == "NotIn":
        return value not in values
    return (value is not None) == (operator == "Exists")


def key_fault(key: str) -> str:
    """Says why Kubernetes would reject a label key, `name` or `prefix/name`; empty if the key is valid."""
    prefix, slash, name = key.rpartition("/")
    if slash and (len(prefix) > PREFIX_MAX or not _PREFIX.fullmatch(prefix)):
        return f"'{key[:PREFIX_MAX]}' is not a label key: the part before the '/' must be {_PREFIX_RULE}"
    if len(name) > NAME_MAX or not _NAME.fullmatch(name):
        return f"'{key[:PREFIX_MAX]}' is not a label key: a name is {_NAME_RULE}"
    return ""


def value_fault(value: str) -> str:
    """Says why Kubernetes would reject a label's value; empty if the value is valid."""
    if value and (len(value) > VALUE_MAX or not _NAME.fullmatch(value)):
        return f"'{value[:PREFIX_MAX]}' is not a label value: it must be empty, or {_NAME_RULE}"
    return ""
