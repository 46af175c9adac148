"""Implements label selectors of Kubernetes: their text form, as in `a=b, c in (d, e), !f, g notin (h), i > 3`, and their rules.

It also has the name of the label for roles.
"""

import re
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

ROLE_LABEL: Final = "llm-d.ai/role"  # the stages of disaggregated serving that an endpoint computes
PREFILL_ROLES: Final = frozenset(("prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode"))
NAME_MAX = VALUE_MAX = 63
PREFIX_MAX = 253
TERMS_MAX = 64

_NAME = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?")
_PREFIX = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
_INTEGER = re.compile(r"[0-9]{1,18}")
_TERM = re.compile(  # one term of a selector that is written as one text
    r"\s*(?:(?P<absent>!)\s*(?P<no>[^\s,!=()<>]+)|(?P<key>[^\s,!=()<>]+)"
    r"(?:\s*(?P<sign>==?|!=|[<>])\s*(?P<value>[^\s,!=()<>]*)|\s+(?P<set>in|notin)\s*\((?P<values>[^()]*)\))?)\s*"
)
_OPERATORS: Final = {"=": "In", "==": "In", "in": "In", "!=": "NotIn", "notin": "NotIn", ">": "Gt", "<": "Lt"}
_NAME_RULE = f"1 to {NAME_MAX} letters, digits, '-', '_' and '.', with a letter or digit at both ends"
_PREFIX_RULE = f"a lower-case DNS name of at most {PREFIX_MAX} characters"

Operator = Literal["In", "NotIn", "Exists", "DoesNotExist"]


class Term(NamedTuple):
    """One condition of a selector. `operator` is In, NotIn, Exists, DoesNotExist, Gt or Lt."""

    key: str
    operator: str
    values: frozenset[str] = frozenset()

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Returns whether labels meet the condition. NotIn holds if the labels do not have the key."""
        value = labels.get(self.key)
        match self.operator:
            case "In":
                return value in self.values
            case "NotIn":
                return value not in self.values
            case "Exists" | "DoesNotExist":
                return (value is not None) == (self.operator == "Exists")
        (limit,) = self.values
        if value is None or not _INTEGER.fullmatch(value):
            return False
        return int(value) > int(limit) if self.operator == "Gt" else int(value) < int(limit)


class Selector(NamedTuple):
    """A selector. All terms must hold, so a selector without terms selects everything. `text`: the selector as the API server reads it."""

    terms: tuple[Term, ...] = ()
    text: str = ""

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Returns whether an object with these labels is selected."""
        return all(term.holds(labels) for term in self.terms)


def of_labels(labels: Mapping[str, str]) -> Selector:
    """Returns the selector for `matchLabels`: each label must have the given value."""
    pairs = sorted(labels.items())
    return Selector(tuple(Term(key, "In", frozenset((value,))) for key, value in pairs), ",".join(f"{key}={value}" for key, value in pairs))


def parse(text: str) -> Selector:
    """Parses a selector that is written as one text. Raises ValueError with the wrong term."""
    terms: list[Term] = []
    at = 0
    while at <= len(text):
        term = _TERM.match(text, at)
        if term is None or (term.end() < len(text) and text[term.end()] != ","):
            raise ValueError(f"'{text[at:]}' does not start with a term such as 'a=b', 'a!=b', 'a in (b, c)', 'a' or '!a'")
        if len(terms) == TERMS_MAX:
            raise ValueError(f"'{text[:PREFIX_MAX]}...' has more than {TERMS_MAX} terms")
        terms.append(_term(term))
        at = term.end() + 1
    return Selector(tuple(terms), text.strip())


def _term(term: re.Match[str]) -> Term:
    key, sign = term["no"] or term["key"], term["sign"] or term["set"]
    values = [] if sign is None else [value.strip() for value in (term["value"] or term["values"] or "").split(",")]
    fault = key_fault(key) or next(filter(None, map(value_fault, values)), "")
    if not fault and sign in ("<", ">") and not _INTEGER.fullmatch(values[0]):
        fault = f"'{key} {sign} {values[0]}': only integers can be compared"
    if fault:
        raise ValueError(fault)
    return Term(key, _OPERATORS[sign] if sign else "DoesNotExist" if term["absent"] else "Exists", frozenset(values))


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
