"""If a gateway does not name the path of a request, the path follows from the fields of the body."""

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.request.paths import DEFAULT_PATH, PATHS, inferred_path

FIELDS = [name for _, names in PATHS for name in names]
VALUES = st.none() | st.integers() | st.text(max_size=3) | st.dictionaries(st.sampled_from(FIELDS), st.integers(), max_size=2)


def expected(names: set[str]) -> str:
    return next((path for path, fields in PATHS if names & set(fields)), DEFAULT_PATH)


@given(st.dictionaries(st.sampled_from([*FIELDS, "model", "stream", "inputs", "x"]), VALUES, max_size=6), st.booleans())
def test_the_first_api_with_one_of_the_fields_at_the_top_counts(body: dict[str, object], spaced: bool) -> None:
    text = json.dumps(body, indent=2 if spaced else None).encode()
    assert inferred_path(text) == inferred_path(memoryview(text)) == expected(set(body))


@pytest.mark.parametrize("body", [b"", b"[]", b'"messages"', b"{", b'{"messages":[}', b"\xff", b"[" * 5000])
def test_a_body_that_is_no_readable_object_gets_the_default(body: bytes) -> None:
    assert inferred_path(body) == DEFAULT_PATH


def test_a_body_with_very_many_fields_takes_no_memory_for_them() -> None:
    body = b"{" + b",".join(b'"%x":0' % number for number in range(50_000)) + b',"messages":[]}'
    tracemalloc.start()
    try:
        assert inferred_path(body) == "/v1/chat/completions"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(body) / 10
