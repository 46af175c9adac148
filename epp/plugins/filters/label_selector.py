"""Keep endpoints by a label selector of Kubernetes."""

from collections.abc import Mapping

import msgspec

from epp.endpoints.label_selectors import Operator, Selector, Term, key_fault, value_fault
from epp.plugin import plugin
from epp.plugins.filters import LabelFilter


class Requirement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of `match_expressions`.

    key: The label.
    operator: How the label is compared.
    values: Needed for In and NotIn, refused for Exists and DoesNotExist.
    """

    key: str
    operator: Operator
    values: tuple[str, ...] = ()


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A LabelSelector of Kubernetes: all requirements must hold. An empty selector selects every endpoint.

    match_labels: Labels with the values that they must have.
    match_expressions: Requirements that an endpoint must meet.
    """

    match_labels: dict[str, str] = {}
    match_expressions: tuple[Requirement, ...] = ()


@plugin("label-selector-filter", "by-label-selector")
class LabelSelector(LabelFilter):
    """Keeps the endpoints that match the label selector. NotIn also matches an endpoint without the label."""

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        terms: list[Term] = []
        for key, value in params.match_labels.items():
            if fault := key_fault(key) or value_fault(value):
                raise ValueError(f"matchLabels: {fault}")
            terms.append(Term(key, "In", frozenset((value,))))
        for index, requirement in enumerate(params.match_expressions):
            _check(requirement, f"matchExpressions[{index}]")
            terms.append(Term(requirement.key, requirement.operator, frozenset(requirement.values)))
        self._selector = Selector(tuple(terms))

    def matches(self, labels: Mapping[str, str]) -> bool:
        return self._selector.matches(labels)


def _check(requirement: Requirement, where: str) -> None:
    if fault := key_fault(requirement.key):
        raise ValueError(f"{where}.key: {fault}")
    takes_values = requirement.operator in ("In", "NotIn")
    if takes_values and not requirement.values:
        raise ValueError(f"{where}.values: operator {requirement.operator} needs at least one value")
    if requirement.values and not takes_values:
        raise ValueError(f"{where}.values: operator {requirement.operator} takes no values")
    for index, value in enumerate(requirement.values):
        if fault := value_fault(value):
            raise ValueError(f"{where}.values[{index}]: {fault}")
