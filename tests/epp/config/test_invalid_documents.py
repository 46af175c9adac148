"""Invalid configurations, each with all of its errors: see invalid_documents.txt.

A block is a document and its errors (`-> line:column: error[rule]: message (hint)`). `…` at the end of an error stands for text that
depends on the registered plugins.
"""

from pathlib import Path

import pytest

from epp.config.findings import ERRORS
from epp.config.load import ConfigErrors, load

BLOCKS = (Path(__file__).parent / "invalid_documents.txt").read_text(encoding="utf-8").removeprefix("==\n").split("\n==\n")
CASES = [(document, ["-> " + line for line in errors]) for document, *errors in (b.strip("\n").split("\n-> ") for b in BLOCKS)]


def refusals(document: str) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        load(document, "c.yaml")
    return [f"-> {str(error).removeprefix('c.yaml:').strip()}" for error in caught.value.errors]


@pytest.mark.parametrize(
    ("document", "expected"), CASES, ids=[f"{i}-{e[0].split(']')[0].split('[')[-1]}" for i, (_, e) in enumerate(CASES)]
)
def test_an_invalid_document_is_refused_with_line_rule_and_message_before_compilation(
    document: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epp.config.load.compile_pipeline", lambda _: pytest.fail("compiled"))
    errors = refusals(document)
    assert len(errors) == len(expected)
    for line, wanted in zip(errors, expected, strict=True):
        assert line.startswith(wanted[:-1]) if wanted.endswith("…") else line == wanted


def test_the_documents_cover_most_rules() -> None:
    assert len(CASES) >= 60
    seen = {line.partition("[")[2].partition("]")[0] for _, errors in CASES for line in errors}
    assert seen <= ERRORS.keys()
    assert len(seen) > 0.7 * len(ERRORS)
