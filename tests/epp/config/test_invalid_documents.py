"""Invalid configurations, each with all of its errors: see invalid_documents.txt.

`…` at the end of an error stands for text that depends on the registered plugins.
"""

import pytest

from epp.config.findings import ERRORS
from epp.config.load import ConfigErrors, load
from tests.epp.config.loading import invalid

CASES = invalid("invalid_documents.txt")


def refusals(document: str) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        load(document, "c.yaml")
    return [str(error).removeprefix("c.yaml:").strip() for error in caught.value.errors]


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
    seen = {line.partition("[")[2].partition("]")[0] for _, errors in (*CASES, *invalid("invalid_pools.txt")) for line in errors}
    assert seen <= ERRORS.keys()
    assert len(seen) > 0.7 * len(ERRORS)
