"""Expressions over what is known of a request: the part of CEL, the Common Expression Language, that makes sense over numbers.

    literals     12  0x1F  1.5  2e3  true  false  null  "text"  'text'
    fields       usage.prompt_tokens   usage["prompt_tokens"]   has(usage.prompt_tokens)   "prompt_tokens" in usage
    arithmetic   + - * / %  unary -              comparison   == != < <= > >=
    logic        && || !  condition ? a : b      conversion   int(x)  double(x)             // comment

Types, precedence and errors are CEL's: integers have 64 bits and overflow is an error, integer division cuts towards zero,
doubles are IEEE's, `a && b` is false if either is, whatever the other's error, and likewise `||`. Wider than CEL in one thing:
arithmetic between an integer and a double is done in doubles, since reported numbers are doubles and literals look like
integers. Lists, maps, messages, macros other than has() and regular expressions are not part of it and refused by name.

`compile_expression` checks syntax and names, once; what it returns is called per request. An expression is at most CHARS_MAX long, has at
most OPERATIONS_MAX operations and nests at most DEPTH_MAX deep, so that none exhausts the stack.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

CHARS_MAX: Final = 4096
OPERATIONS_MAX: Final = 200
DEPTH_MAX: Final = 32
INT_MIN: Final = -(1 << 63)
INT_MAX: Final = (1 << 63) - 1

Values = Mapping[str, Any]
Expression = Callable[[Values], Any]


class SyntaxFault(ValueError):
    """Not an expression of this language; the text says where and why."""


class EvaluationFault(Exception):
    """An expression that has no value for these inputs."""


class NoSuchField(EvaluationFault):
    """A field that is not there; `has()` asks for it."""


class NoSuchOverload(EvaluationFault):
    """An operation on types that it is not made for."""


class DivisionByZero(EvaluationFault):
    """Of integers; doubles give infinity."""


class Overflow(EvaluationFault):
    """An integer beyond 64 bits."""


class Token(NamedTuple):
    """`kind`: number, text, name, sign, or end. `at` counts from 1."""

    kind: str
    text: str
    at: int


_TOKENS = re.compile(
    r"""(?P<blank>[ \t\r\n\f]+|//[^\n]*)
      | (?P<number>0[xX][0-9a-fA-F]+[uU]?|(?:\d+\.\d+|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?|\d+[uU]?)
      | (?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<sign>&&|\|\||[=!<>]=|[-+*/%<>!?:.()\[\],{}])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(.)")
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'", "`": "`", "?": "?"}
_WORDS: Final = {"true": True, "false": False, "null": None}
_FUNCTIONS: Final = ("has", "int", "double")
_LEVELS: Final = {  # binary operators, from the loosest; all but ?: associate to the left
    "||": 1, "&&": 2, "==": 3, "!=": 3, "<": 3, "<=": 3, ">": 3, ">=": 3, "in": 3, "+": 4, "-": 4, "*": 5, "/": 5, "%": 5,
}  # fmt: skip


def compile_expression(text: str, names: Collection[str]) -> Expression:
    """An expression over variables of these names. Raises SyntaxFault."""
    if len(text) > CHARS_MAX:
        raise SyntaxFault(f"an expression has at most {CHARS_MAX} characters, this one {len(text)}")
    parser = _Parser(_tokens(text), names)
    expression = parser.ternary()
    parser.expect("end", "")
    return expression


def _tokens(text: str) -> list[Token]:
    tokens, at = list[Token](), 0
    while at < len(text):
        match = _TOKENS.match(text, at)
        if match is None:
            raise SyntaxFault(f"column {at + 1}: unexpected {text[at]!r}")
        kind = match.lastgroup or ""
        if kind != "blank":
            tokens.append(Token(kind, match.group(), at + 1))
        at = match.end()
    tokens.append(Token("end", "", len(text) + 1))
    return tokens


class _Parser:
    """Precedence climbing; every rule returns a closure."""

    def __init__(self, tokens: list[Token], names: Collection[str]) -> None:
        self.tokens = tokens
        self.names = names
        self.next = 0
        self.operations = 0
        self.depth = 0

    # Tokens

    def peek(self, text: str) -> bool:
        token = self.tokens[self.next]
        return token.text == text and token.kind in ("sign", "name")

    def take(self, text: str) -> bool:
        if self.peek(text):
            self.next += 1
            return True
        return False

    def expect(self, kind: str, text: str) -> Token:
        token = self.tokens[self.next]
        if token.kind != kind or (text and token.text != text):
            self.fail(token, f"expected {text or ('the end' if kind == 'end' else f'a {kind}')!r}")
        self.next += 1
        return token

    def fail(self, token: Token, why: str) -> None:
        found = f"'{token.text}'" if token.text else "the end"
        raise SyntaxFault(f"column {token.at}: {why}, got {found}")

    def count(self) -> None:
        self.operations += 1
        if self.operations > OPERATIONS_MAX:
            raise SyntaxFault(f"an expression has at most {OPERATIONS_MAX} operations")

    # Rules

    def ternary(self) -> Expression:
        self.depth += 1
        if self.depth > DEPTH_MAX:
            raise SyntaxFault(f"an expression nests at most {DEPTH_MAX} deep")
        condition = self.binary(1)
        if self.take("?"):
            self.count()
            yes = self.binary(1)
            self.expect("sign", ":")
            condition = _choice(condition, yes, self.ternary())
        self.depth -= 1
        return condition

    def binary(self, level: int) -> Expression:
        left = self.unary()
        while (own := _LEVELS.get(self.tokens[self.next].text, 0)) >= level and self.tokens[self.next].kind != "text":
            operator = self.tokens[self.next].text
            self.next += 1
            self.count()
            left = _operation(operator, left, self.binary(own + 1))
        return left

    def unary(self) -> Expression:
        for sign, operation in (("-", _negated), ("!", _inverted)):
            signs = 0
            while self.take(sign):
                signs += 1
                self.count()
            if signs:
                operand = self.member()
                for _ in range(signs):
                    operand = operation(operand)
                return operand
        return self.member()

    def member(self) -> Expression:
        operand = self.primary()
        while True:
            if self.take("."):
                self.count()
                name = self.expect("name", "")
                if self.peek("("):
                    self.fail(name, "methods and macros are not supported")
                operand = _field(operand, _constant(name.text))
            elif self.take("["):
                self.count()
                operand = _field(operand, self.ternary())
                self.expect("sign", "]")
            else:
                return operand

    def primary(self) -> Expression:
        token = self.tokens[self.next]
        self.next += 1
        if token.kind == "number":
            return _constant(self.number(token))
        if token.kind == "text":
            return _constant(self.text(token))
        if token.kind == "name":
            if token.text in _WORDS:
                return _constant(_WORDS[token.text])
            return self.call(token) if self.peek("(") else self.variable(token)
        if token.text == "(":
            inner = self.ternary()
            self.expect("sign", ")")
            return inner
        if token.text in ("[", "{"):
            self.fail(token, "lists and maps are not supported")
        self.fail(token, "expected a value")
        raise AssertionError

    def number(self, token: Token) -> int | float:
        digits = token.text.rstrip("uU")
        if digits[:2] in ("0x", "0X"):
            number = int(digits, 16)
        elif digits.isdecimal():
            number = int(digits)
        else:
            return float(digits)
        if number > INT_MAX:
            self.fail(token, "integers have 64 bits")
        return number

    def text(self, token: Token) -> str:
        def plain(match: re.Match[str]) -> str:
            if match[1] not in _ESCAPES:
                self.fail(token, f"unknown escape '\\{match[1]}'")
            return _ESCAPES[match[1]]

        return _ESCAPE.sub(plain, token.text[1:-1])

    def variable(self, token: Token) -> Expression:
        name = token.text
        if name not in self.names:
            self.fail(
                token, f"known variables: {', '.join(sorted(self.names))}; known functions: {', '.join(_FUNCTIONS)}"
            )
        return lambda values: values[name]

    def call(self, token: Token) -> Expression:
        if token.text not in _FUNCTIONS:
            self.fail(token, f"known functions: {', '.join(_FUNCTIONS)}")
        self.count()
        self.expect("sign", "(")
        if token.text == "has":
            return self.presence(token)
        convert = _to_int if token.text == "int" else _to_double
        operand = self.ternary()
        self.expect("sign", ")")
        return lambda values: convert(operand(values))

    def presence(self, token: Token) -> Expression:
        """has(e.f): the last selection is not evaluated."""
        end = self.next
        operand, name = self.primary(), ""
        while self.take("."):
            self.count()
            if name:
                operand = _field(operand, _constant(name))
            name = self.expect("name", "").text
        if not name or not self.peek(")"):
            self.fail(self.tokens[end], "has() takes a field, as in has(usage.prompt_tokens)")
        self.expect("sign", ")")
        found, key = operand, name
        return lambda values: key in _fields(found(values))


# Meanings. A bool is no number in CEL, though it is one in Python.


def _type(value: Any) -> str:
    names = {bool: "bool", int: "int", float: "double", str: "string", type(None): "null"}
    return names.get(type(value), "map")


def _number(value: Any) -> bool:
    return type(value) is int or type(value) is float


def _refused(operator: str, *values: Any) -> NoSuchOverload:
    return NoSuchOverload(f"no such overload: {operator} of {' and '.join(map(_type, values))}")


def _bool(value: Any, operator: str) -> bool:
    if type(value) is not bool:
        raise _refused(operator, value)
    return value


def _fields(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _refused("field selection", value)
    return value


def _int(value: int) -> int:
    if not INT_MIN <= value <= INT_MAX:
        raise Overflow("an integer beyond 64 bits")
    return value


def _to_int(value: Any) -> int:
    if not _number(value):
        raise _refused("int()", value)
    if not math.isfinite(value):
        raise Overflow(f"int() of {value}")
    return _int(int(value))


def _to_double(value: Any) -> float:
    if not _number(value):
        raise _refused("double()", value)
    return float(value)


def _constant(value: Any) -> Expression:
    return lambda values: value


def _choice(condition: Expression, yes: Expression, no: Expression) -> Expression:
    return lambda values: yes(values) if _bool(condition(values), "?:") else no(values)


def _negated(operand: Expression) -> Expression:
    def negate(values: Values) -> Any:
        value = operand(values)
        if not _number(value):
            raise _refused("-", value)
        return -value if type(value) is float else _int(-value)

    return negate


def _inverted(operand: Expression) -> Expression:
    return lambda values: not _bool(operand(values), "!")


def _field(operand: Expression, key: Expression) -> Expression:
    def select(values: Values) -> Any:
        fields, name = _fields(operand(values)), key(values)
        if name not in fields:
            raise NoSuchField(f"no such field: {name}")
        return fields[name]

    return select


def _operation(operator: str, left: Expression, right: Expression) -> Expression:
    if operator in ("&&", "||"):
        return _logic(operator, left, right)
    apply = _MEANINGS[operator]
    return lambda values: apply(left(values), right(values))


def _logic(operator: str, left: Expression, right: Expression) -> Expression:
    """The side that decides wins over the other's error."""
    deciding = operator == "||"

    def either(values: Values) -> bool:
        try:
            first = _bool(left(values), operator)
        except EvaluationFault:
            if _bool(right(values), operator) is deciding:
                return deciding
            raise
        return first if first is deciding else _bool(right(values), operator)

    return either


def _arithmetic(operator: str, on_ints: Callable[[int, int], int], on_doubles: Callable[[float, float], float]) -> Any:
    def apply(left: Any, right: Any) -> Any:
        if type(left) is int and type(right) is int:
            return _int(on_ints(left, right))
        if _number(left) and _number(right):
            return on_doubles(float(left), float(right))
        raise _refused(operator, left, right)

    return apply


def _divided(left: int, right: int) -> int:
    if not right:
        raise DivisionByZero("division by zero")
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _double_divided(left: float, right: float) -> float:
    if right:
        return left / right
    return math.nan if not left or math.isnan(left) else math.copysign(math.inf, left) * math.copysign(1.0, right)


def _remainder(left: Any, right: Any) -> int:
    if type(left) is not int or type(right) is not int:
        raise _refused("%", left, right)
    return left - right * _divided(left, right)


def _equal(left: Any, right: Any) -> bool:
    if _number(left) and _number(right):
        return bool(left == right)
    return type(left) is type(right) and bool(left == right)


def _ordering(operator: str, compare: Callable[[Any, Any], bool]) -> Any:
    def apply(left: Any, right: Any) -> bool:
        alike = type(left) is type(right) and type(left) in (bool, str)
        if alike or (_number(left) and _number(right)):
            return compare(left, right)
        raise _refused(operator, left, right)

    return apply


def _added(left: Any, right: Any) -> Any:
    if type(left) is str and type(right) is str:
        return left + right
    return _plus(left, right)


_plus = _arithmetic("+", int.__add__, float.__add__)
_MEANINGS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "+": _added,
    "-": _arithmetic("-", int.__sub__, float.__sub__),
    "*": _arithmetic("*", int.__mul__, float.__mul__),
    "/": _arithmetic("/", _divided, _double_divided),
    "%": _remainder,
    "==": _equal,
    "!=": lambda left, right: not _equal(left, right),
    "<": _ordering("<", lambda left, right: left < right),
    "<=": _ordering("<=", lambda left, right: left <= right),
    ">": _ordering(">", lambda left, right: left > right),
    ">=": _ordering(">=", lambda left, right: left >= right),
    "in": lambda left, right: left in _fields(right),
}
