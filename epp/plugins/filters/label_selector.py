"""Keep endpoints by their labels, as Kubernetes selects pods."""

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from epp.plugin import plugin
from epp.plugins.filters import LabelFilter

NAME_MAX = VALUE_MAX = 63
PREFIX_MAX = 253

_NAME = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?")
_PREFIX = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
_NAME_RULE = f"1 to {NAME_MAX} letters, digits, '-', '_' and '.', with a letter or digit at both ends"
_PREFIX_RULE = f"a lower-case DNS name of at most {PREFIX_MAX} characters"

Operator = Literal["In", "NotIn", "Exists", "DoesNotExist"]


class Requirement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of `matchExpressions`. In and NotIn take values, Exists and DoesNotExist none."""

    key: str
    operator: Operator
    values: tuple[str, ...] = ()


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A LabelSelector of Kubernetes: everything in it must hold; an empty one selects everyone."""

    match_labels: dict[str, str] = {}
    match_expressions: tuple[Requirement, ...] = ()


@plugin("label-selector-filter", "by-label-selector")
class LabelSelector(LabelFilter):
    """Keeps endpoints that the selector matches; NotIn matches an endpoint without the label too."""

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        rules: list[tuple[str, str, frozenset[str]]] = []
        for key, value in params.match_labels.items():
            if fault := _key_fault(key) or _value_fault(value):
                raise ValueError(f"matchLabels: {fault}")
            rules.append((key, "In", frozenset((value,))))
        for index, requirement in enumerate(params.match_expressions):
            _check(requirement, f"matchExpressions[{index}]")
            rules.append((requirement.key, requirement.operator, frozenset(requirement.values)))
        self._rules = tuple(rules)

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(_holds(labels.get(key), operator, values) for key, operator, values in self._rules)


def _holds(value: str | None, operator: str, values: frozenset[str]) -> bool:
    if operator == "In":
        return value in values
    if operator == "NotIn":
        return value not in values
    return (value is not None) == (operator == "Exists")


def _check(requirement: Requirement, where: str) -> None:
    if fault := _key_fault(requirement.key):
        raise ValueError(f"{where}.key: {fault}")
    takes_values = requirement.operator in ("In", "NotIn")
    if takes_values and not requirement.values:
        raise ValueError(f"{where}.values: operator {requirement.operator} needs at least one value")
    if requirement.values and not takes_values:
        raise ValueError(f"{where}.values: operator {requirement.operator} takes no values")
    for index, value in enumerate(requirement.values):
        if fault := _value_fault(value):
            raise ValueError(f"{where}.values[{index}]: {fault}")


def _key_fault(key: str) -> str:
    """What Kubernetes has against a label's key, `name` or `prefix/name`."""
    prefix, slash, name = key.rpartition("/")
    if slash and (len(prefix) > PREFIX_MAX or not _PREFIX.fullmatch(prefix)):
        return f"'{key[:PREFIX_MAX]}' is no label key: what is before the '/' must be {_PREFIX_RULE}"
    if len(name) > NAME_MAX or not _NAME.fullmatch(name):
        return f"'{key[:PREFIX_MAX]}' is no label key: a name is {_NAME_RULE}"
    return ""


def _value_fault(value: str) -> str:
    if value and (len(value) > VALUE_MAX or not _NAME.fullmatch(value)):
        return f"'{value[:PREFIX_MAX]}' is no label value: it is empty, or {_NAME_RULE}"
    return ""
