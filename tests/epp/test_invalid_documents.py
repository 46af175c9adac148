"""Documents that are refused, each with all that is said about it: see invalid_documents.txt.

A block is a document and the errors (`-> line:column: error[rule]: message (hint)`) that it gets; `…` at the end of one stands for
what depends on the plugins that there are.
"""

from pathlib import Path

import pytest

from epp.config import ConfigErrors, load
from epp.findings import ERRORS

BLOCKS = (
    (Path(__file__).parent / "invalid_documents.txt").read_text(encoding="utf-8").removeprefix("==\n").split("\n==\n")
)
CASES = [
    (document, ["-> " + line for line in found]) for document, *found in (b.strip("\n").split("\n-> ") for b in BLOCKS)
]


def refusals(document: str) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        load(document, "c.yaml")
    return [f"-> {str(error).removeprefix('c.yaml:').strip()}" for error in caught.value.errors]


@pytest.mark.parametrize(
    ("document", "expected"), CASES, ids=[f"{i}-{e[0].split(']')[0].split('[')[-1]}" for i, (_, e) in enumerate(CASES)]
)
def test_a_wrong_document_is_refused_with_line_rule_and_message_before_anything_is_compiled(
    document: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epp.config.compile_pipeline", lambda _: pytest.fail("compiled"))
    found = refusals(document)
    assert len(found) == len(expected)
    for line, wanted in zip(found, expected, strict=True):
        assert line.startswith(wanted[:-1]) if wanted.endswith("…") else line == wanted


def test_there_are_many_of_them_of_most_rules() -> None:
    assert len(CASES) >= 60
    seen = {line.partition("[")[2].partition("]")[0] for _, found in CASES for line in found}
    assert seen <= ERRORS.keys()
    assert len(seen) > 0.7 * len(ERRORS)
