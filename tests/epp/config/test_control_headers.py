"""The list of control headers: complete, without repetition, and with a word for each group about what a client can do."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from epp.config.control_headers import CONTROL_HEADERS, POWERS, exposed, header_notes
from epp.protocol.codec import DESTINATION, NEVER_PASSED
from epp.request.client_headers import GATEWAY, GROUPS, STEERING

EPP = Path(__file__).parents[3] / "epp"
PREFIXES = re.compile(r"x-(llm-d|gateway|slo)-[a-z-]+")
# Headers of these prefixes that steer nothing: what the picker says to clients, and what a request says of its own content.
HARMLESS = {
    "x-llm-d-request-dropped-reason",
    "x-llm-d-receipt",
    "x-llm-d-video-duration-seconds",
    "x-llm-d-video-fps",
    "x-llm-d-video-resolution",
}


def named() -> Iterator[str]:
    """Yields the texts in the code of `epp` that are names of such headers."""
    for file in EPP.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and PREFIXES.fullmatch(node.value):
                yield node.value


def test_the_list_has_every_header_that_names_servers_steers_a_sidecar_or_is_trusted() -> None:
    trusted = [name for names in GROUPS.values() for name in names]
    assert sorted(CONTROL_HEADERS) == sorted([DESTINATION, *NEVER_PASSED, *STEERING, *trusted])
    assert len(set(CONTROL_HEADERS)) == len(CONTROL_HEADERS)
    assert all(name == name.lower() for name in CONTROL_HEADERS)


def test_no_header_that_the_code_names_is_missing() -> None:
    found = {name for name in named() if not name.endswith("-")}
    assert found - HARMLESS <= set(CONTROL_HEADERS)
    assert {name for name in CONTROL_HEADERS if PREFIXES.fullmatch(name)} <= found


def test_each_group_says_what_a_client_can_do_with_it() -> None:
    assert POWERS.keys() == GROUPS.keys()
    assert exposed(("model", "fairness")) == [f"{POWERS[group]} ({group})" for group in ("fairness", "model")]


def test_nothing_is_said_without_trust_or_if_the_gateway_removes_the_headers() -> None:
    assert header_notes((), "c.yaml") == header_notes((GATEWAY, *GROUPS), "c.yaml") == []
    (note,) = header_notes(tuple(GROUPS), "c.yaml")
    assert all(f"({group})" in note.message for group in GROUPS) and GATEWAY in note.hint
