"""Batches of records travel in packets: whole, or not at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.learning.samples import is_samples
from epp.recording.batches import CONTENT_MAX, PACKET_BYTES_MAX, Assembler, CorruptPacket, Whole, is_records, packets

contents = st.binary(min_size=1, max_size=3 * CONTENT_MAX)


@given(data=contents, records=st.integers(1, 1000))
def test_a_batch_comes_out_as_it_went_in(data: bytes, records: int) -> None:
    assembler = Assembler()
    sent = list(packets(data, records, stream=7, file=3))
    assert all(len(packet) <= PACKET_BYTES_MAX and is_records(packet) and not is_samples(packet) for packet in sent)
    *before, last = [assembler.take(packet) for packet in sent]
    assert before == [None] * (len(sent) - 1)
    assert last == Whole(3, records, data)


@given(data=st.data())
def test_batches_of_several_workers_may_mix_and_lose_packets(data: st.DataObject) -> None:
    assembler = Assembler()
    sent = {stream: [data.draw(contents) for _ in range(3)] for stream in (1, 2)}
    queues = {s: [p for batch in batches for p in packets(batch, 1, s, 1)] for s, batches in sent.items()}
    got: list[bytes] = []
    while any(queues.values()):
        stream = data.draw(st.sampled_from([s for s, queue in queues.items() if queue]))
        packet = queues[stream].pop(0)
        if data.draw(st.integers(0, 9)) and (whole := assembler.take(packet)) is not None:
            got.append(whole.data)
    assert set(got) <= {batch for batches in sent.values() for batch in batches}


@given(data=st.binary(max_size=PACKET_BYTES_MAX + 1))
def test_bytes_that_are_no_packet_are_refused_or_incomplete(data: bytes) -> None:
    assembler = Assembler()
    try:
        whole = assembler.take(data)
    except CorruptPacket:
        return
    assert whole is None or data.endswith(whole.data)


def test_a_packet_without_content_is_refused() -> None:
    packet = next(packets(b"x", 1, 1, 1))
    with pytest.raises(CorruptPacket, match="20 bytes"):
        Assembler().take(packet[:-1])
