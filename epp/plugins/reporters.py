"""Reporters give the gateway data about a finished response: a number, computed from the tokens that the model server counted."""

import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Annotated, Any, Final

import msgspec

from epp.decision.decision import Decision, Response, Usage
from epp.plugin import ResponseComplete, Services, plugin
from epp.request import Request

# The library imports its own command, with a dozen packages for terminals. An empty module takes its place.
sys.modules.setdefault("cel.cli", ModuleType("cel.cli"))
try:
    import cel
except ImportError:  # the library is an optional dependency, because most configurations have no CEL expression
    cel = None  # type: ignore[assignment]

NAMESPACE: Final = "envoy.lb"
SAMPLE: Final = Usage(prompt=1000, completion=100, cached=500)
EXPRESSION_CHARS_MAX: Final = 4096
MESSAGE_CHARS_MAX: Final = 300  # characters of an error text, because the library quotes its whole grammar

Expression = Callable[[dict[str, Any]], Any]
NotEmpty = Annotated[str, msgspec.Meta(min_length=1, max_length=EXPRESSION_CHARS_MAX)]


class AttributeKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Where the number goes in Envoy's dynamic metadata.

    name: The name of the field.
    namespace: The namespace; empty means `envoy.lb`.
    """

    name: NotEmpty
    namespace: str = ""


class Attribute(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Reports the value of `expression` if `condition` is empty or true. Both are written in CEL, the Common Expression Language.

    key: Where the value goes.
    expression: The value, a number.
    condition: Whether the value is reported; empty means always.
    """

    key: AttributeKey
    expression: NotEmpty
    condition: Annotated[str, msgspec.Meta(max_length=EXPRESSION_CHARS_MAX)] = ""


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What is reported.

    attributes: Exactly one attribute.
    """

    attributes: Annotated[tuple[Attribute, ...], msgspec.Meta(min_length=1, max_length=1)]


@plugin("request-attribute-reporter")
class RequestAttribute(ResponseComplete):
    """Reports a number computed by a CEL expression over `usage`, as dynamic metadata.

    `usage` has prompt_tokens, completion_tokens and total_tokens (0 where the server did not report them), and
    prompt_tokens_details.cached_tokens where the server reported it; all are doubles, so write `2.0 * usage.prompt_tokens`. The value is
    truncated to an integer. A value of 0, or a value that needs a missing field, is not reported. Expressions are evaluated once at start,
    so the picker does not start with a wrong expression. If an expression fails later, the failure is logged and no value is reported.
    Source of the language: https://github.com/google/cel-spec.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        (attribute,) = params.attributes
        self._namespace = attribute.key.namespace or NAMESPACE
        self._key = attribute.key.name
        self._expression = compiled(attribute.expression, "expression", (int, float), "a number")
        self._condition = compiled(attribute.condition, "condition", (bool,), "true or false") if attribute.condition else None
        self._services: Services

    def start(self, services: Services) -> None:
        self._services = services

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        values = variables(response.usage)
        try:
            if self._condition is not None and self._condition(values) is not True:
                return
            value = self._expression(values)
        except KeyError:  # the expression needs a field that the server did not report
            return
        except Exception as fault:
            self._services.warn(self, "request attribute has no value", key=self._key, reason=_shortened(fault))
            return
        if type(value) in (int, float) and math.isfinite(value) and int(value):
            response.metadata.setdefault(self._namespace, {})[self._key] = int(value)


def compiled(text: str, field: str, types: tuple[type, ...], kind: str) -> Expression:
    """Compiles an expression, and tries it with a usage in which no field is missing. `field`: the path of the parameter.

    Raises ValueError if the expression is invalid, or its value is not of one of these types.
    """
    where = f"attributes[0].{field}"
    if cel is None:
        raise ValueError(f"{where}: CEL is not installed; pip install 'endpoint-picker[cel]'")
    try:
        expression: Expression = cel.compile(text).execute
        value = expression(variables(SAMPLE))
    except (ZeroDivisionError, OverflowError):  # an expression may fail for these figures and work for others
        return expression
    except KeyError as fault:
        raise ValueError(f"{where}: `usage` has no field {fault}") from fault
    except Exception as fault:
        raise ValueError(f"{where}: {_shortened(fault)}") from fault
    if type(value) not in types:
        raise ValueError(f"{where}: must give {kind}, but gives {value!r} for a usual usage")
    return expression


def variables(usage: Usage | None) -> dict[str, Any]:
    """Returns the variables of the expressions."""
    prompt, completion = (usage.prompt or 0, usage.completion or 0) if usage is not None else (0, 0)
    fields: dict[str, Any] = {
        "prompt_tokens": float(prompt),
        "completion_tokens": float(completion),
        "total_tokens": float(prompt + completion),
    }
    if usage is not None and usage.cached is not None:
        fields["prompt_tokens_details"] = {"cached_tokens": float(usage.cached)}
    return {"usage": fields}


def _shortened(fault: Exception) -> str:
    """Returns the library's message in one line, shortened."""
    return " ".join(str(fault).split())[:MESSAGE_CHARS_MAX]
