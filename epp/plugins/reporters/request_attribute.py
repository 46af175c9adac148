"""Report a number about a finished request to the gateway, computed from the tokens that the model server counted."""

import math
from typing import Annotated, Any

import msgspec

from epp.decision import Decision, Response, Usage
from epp.plugin import ResponseComplete, Services, plugin
from epp.plugins.reporters import _cel as cel
from epp.request import Request

NAMESPACE = "envoy.lb"
NAMES = ("usage",)
SAMPLE = Usage(prompt=1000, completion=100, cached=500)
NotEmpty = Annotated[str, msgspec.Meta(min_length=1)]


class AttributeKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Where the number goes in the dynamic metadata; an empty namespace is `envoy.lb`."""

    name: NotEmpty
    namespace: str = ""


class Attribute(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What is reported: the value of `expression`, when `condition` is empty or true. Both are CEL (`_cel.py`)."""

    key: AttributeKey
    expression: NotEmpty
    condition: str = ""


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Exactly one attribute."""

    attributes: Annotated[tuple[Attribute, ...], msgspec.Meta(min_length=1, max_length=1)]


@plugin("request-attribute-reporter")
class RequestAttribute(ResponseComplete):
    """Expressions see `usage` with prompt_tokens, completion_tokens and total_tokens (0 where not reported), and
    prompt_tokens_details.cached_tokens where it was reported; all are doubles.

    The value is cut to an integer; 0 is not reported, nor what has no value because a field is missing. Expressions are tried
    once at start, so that one that cannot work stops it; what fails later is said in the log, and nothing is reported.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        (attribute,) = params.attributes
        self._namespace = attribute.key.namespace or NAMESPACE
        self._key = attribute.key.name
        self._expression = compiled(attribute.expression, "expression", (int, float), "a number")
        self._condition = (
            compiled(attribute.condition, "condition", (bool,), "true or false") if attribute.condition else None
        )
        self._services: Services

    def start(self, services: Services) -> None:
        self._services = services

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        values = variables(response.usage)
        try:
            if self._condition is not None and self._condition(values) is not True:
                return
            value = self._expression(values)
        except cel.NoSuchField:
            return
        except cel.EvaluationFault as fault:
            self._services.warn(self, f"request attribute '{self._key}' has no value: {fault}")
            return
        if type(value) in (int, float) and math.isfinite(value) and int(value):
            response.metadata.setdefault(self._namespace, {})[self._key] = int(value)


def compiled(text: str, field: str, types: tuple[type, ...], words: str) -> cel.Expression:
    """The expression, if it compiles and gives one of these types for a full usage. Raises ValueError with the field's path."""
    where = f"attributes[0].{field}"
    try:
        expression = cel.compile_expression(text, NAMES)
        value = expression(variables(SAMPLE))
    except (cel.SyntaxFault, cel.NoSuchField, cel.NoSuchOverload) as fault:
        raise ValueError(f"{where}: {fault}") from fault
    except cel.EvaluationFault:  # a matter of the numbers: others may do
        return expression
    if type(value) not in types:
        raise ValueError(f"{where}: must give {words}, but gives {value!r} for a usual usage")
    return expression


def variables(usage: Usage | None) -> dict[str, Any]:
    """What expressions see."""
    prompt, completion = (usage.prompt or 0, usage.completion or 0) if usage is not None else (0, 0)
    fields: dict[str, Any] = {
        "prompt_tokens": float(prompt),
        "completion_tokens": float(completion),
        "total_tokens": float(prompt + completion),
    }
    if usage is not None and usage.cached is not None:
        fields["prompt_tokens_details"] = {"cached_tokens": float(usage.cached)}
    return {"usage": fields}
