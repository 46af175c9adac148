"""Every extractor of pages meets its contract, whatever a server sends."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.data import KV_USAGE, WAITING, Column
from epp.plugins.extractors._pages import ExtractError, PageExtractor
from tests.contract.test_every_plugin import made, of
from tests.examples import examples

FRAGMENTS = (
    b"vllm:num_requests_waiting 3\n", b"vllm:num_requests_running 1\n", b"vllm:kv_cache_usage_perc 0.5\n",
    b"DCGM_FI_DEV_GPU_UTIL", b'{gpu="0",pod="p"}', b" 50\n", b"{", b"}", b'"', b"\\", b"\n", b" NaN\n", b"-1",
    b'{"data":[', b'{"id":"m"}', b"]}", b"llm_d_epp_average_queue_size", b"llm_d_epp_average_kv_cache_utilization 0.5\n",
)  # fmt: skip
PAGES = st.one_of(st.binary(max_size=200), st.lists(st.sampled_from(FRAGMENTS), max_size=12).map(b"".join))


@pytest.mark.parametrize("cls", of(PageExtractor), ids=lambda cls: cls.type_name)
@given(page=PAGES, own=st.booleans(), pod=st.sampled_from(["", "p", "q"]))
@examples(150)
def test_a_page_gives_numbers_for_the_wanted_columns_or_is_rejected(cls: type[PageExtractor], page: bytes, own: bool, pod: str) -> None:
    extractor: Any = made(cls)
    columns: list[Column[Any]] = [WAITING, KV_USAGE, Column("other", float)]
    wanted = [*columns, *(key for key in extractor.produces if own and key not in columns)]
    numeric = [column.name for column in wanted if column.type is not frozenset]
    mine = {key.name for key in extractor.produces}
    reader = extractor.extraction({}, wanted, pod)
    for _ in range(2):
        try:
            found = reader.extract(page)
        except ExtractError as rejected:
            assert str(rejected)
            continue
        assert len(found.values) == len(numeric) and all(value == value for value in found.values)
        reported = {name for at, name in enumerate(numeric) if found.present >> at & 1}
        assert reported <= mine and found.present < 1 << len(numeric)
        assert set(found.names) <= mine
