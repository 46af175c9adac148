"""Tests of sizes, offsets and hashes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.documents import DocumentSchema
from shm.layout import CACHE_LINE, Plan, aligned, layout_hash
from shm.prefix_index import IndexSchema
from shm.table import TableSchema

SCHEMAS = {"table": TableSchema(("a", "b"), 7), "documents": DocumentSchema((10, 100)), "index": IndexSchema(1000)}


@given(st.integers(0, 10**6))
def test_aligned_is_the_next_multiple(size: int) -> None:
    assert size <= aligned(size) < size + CACHE_LINE
    assert aligned(size) % CACHE_LINE == 0


def test_parts_follow_each_other_without_overlap_on_their_own_lines() -> None:
    plan = Plan(SCHEMAS)
    end = 0
    for name, schema in SCHEMAS.items():
        assert plan.offsets[name] >= end
        assert plan.offsets[name] % CACHE_LINE == 0
        assert plan.sizes[name] == schema.bytes
        end = plan.offsets[name] + schema.bytes
    assert plan.bytes >= end


def test_the_description_is_sufficient_to_read_the_parts() -> None:
    described = json.loads(Plan(SCHEMAS).description)
    assert described["table"]["columns"] == ["a", "b"]
    assert described["index"]["at"] == Plan(SCHEMAS).offsets["index"]


@pytest.mark.parametrize("leave_out", SCHEMAS)
def test_a_plan_with_other_parts_has_another_hash(leave_out: str) -> None:
    fewer = {name: schema for name, schema in SCHEMAS.items() if name != leave_out}
    assert Plan(fewer).layout_hash != Plan(SCHEMAS).layout_hash
    assert Plan(dict(reversed(SCHEMAS.items()))).layout_hash != Plan(SCHEMAS).layout_hash


def test_a_layout_hash_is_the_same_in_every_process_and_fits_a_word() -> None:
    assert layout_hash("a", 1) == layout_hash("a", 1) != layout_hash("a", 2)
    assert 0 <= layout_hash("x") < 2**64
