"""HPACK compared with the hpack library, and what the decoder remembers."""

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tests.examples import examples
from tests.modes import interpreted_only
from workers.transport.answer_blocks import refusal_block, trailers_block
from workers.transport.headers import REMEMBERED_BLOCKS, BrokenBlock, FieldKinds, HeaderDecoder, request_head
from workers.transport.limits import Limits

names = st.sampled_from([":method", ":path", "te", "content-type", "x-a", "x-request-id", "grpc-timeout"])
values = st.one_of(st.sampled_from(["", "POST", "/", "trailers"]), st.text(st.characters(codec="ascii"), max_size=200))
header_lists = st.lists(st.tuples(names, values, st.booleans()), max_size=12)
GRPC = [(":method", "POST"), (":scheme", "http"), (":authority", "a:1"), (":path", "/a/B"), ("content-type", "application/grpc")]
PARTS = ("authority", "content_length", "encoding", "metadata", "path", "problem", "refusal", "timeout")  # of a RequestHead


def as_bytes(headers):
    return [(n.encode(), v.encode()) for n, v in headers]


@given(st.lists(st.tuples(header_lists, st.booleans(), st.sampled_from([None, 0, 100, 4096])), max_size=8))
@examples(300)
def test_blocks_that_the_library_encodes_are_decoded_the_same(blocks):
    encoder, decoder = hpack.Encoder(), HeaderDecoder(Limits())
    for headers, huffman, size in blocks:
        if size is not None:
            encoder.header_table_size = size
        kinds = {True: hpack.NeverIndexedHeaderTuple, False: hpack.HeaderTuple}
        block = encoder.encode([kinds[secret](n, v) for n, v, secret in headers], huffman=huffman)
        assert decoder.fields(block) == as_bytes((n, v) for n, v, _ in headers)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=5))
@examples(500)
def test_any_bytes_give_the_same_fields_as_the_library_or_fail_like_it(blocks):
    ours, theirs = HeaderDecoder(Limits()), hpack.Decoder()
    for block in blocks:
        try:
            expected = [tuple(field) for field in theirs.decode(block, raw=True)]
        except hpack.HPACKError:
            expected = None
        try:
            fields = ours.fields(block)
        except BrokenBlock:
            fields = None
        if fields is None and expected is not None:
            assert any(byte in block for byte in b"\x80\x81\x82\x83\xff")  # integers padded longer than we allow
            return
        assert fields == expected
        if expected is None:
            return


def test_entries_beyond_the_table_are_evicted_oldest_first():
    decoder = HeaderDecoder(Limits())
    encoder = hpack.Encoder()
    for i in range(300):
        headers = [("x-number", str(i) * 20), ("x-number", str(i // 2) * 20)]
        assert decoder.fields(encoder.encode(headers)) == as_bytes(headers)


@pytest.mark.parametrize(
    "block",
    [b"\x80", b"\xbe", b"\xff\xff\xff\xff\xff\x0f", b"\x40\x05ab", b"\x40\x01a\x83\xff\xff\xff", b"\x3f\xe2\x1f", b"\x82\x20", b"\x40"],
)
def test_broken_blocks_are_refused(block):
    with pytest.raises(BrokenBlock):
        HeaderDecoder(Limits()).fields(block)


def test_too_many_fields_or_bytes_are_refused():
    decoder = HeaderDecoder(Limits())
    assert len(decoder.fields(b"\x82" * 128)) == 128
    with pytest.raises(BrokenBlock):
        decoder.fields(b"\x82" * 129)
    with pytest.raises(BrokenBlock):
        decoder.fields(b"\x40\x01a\x7f\x81\x17" + bytes(3072) + b"\xbe" * 30)


def test_a_block_that_does_not_change_the_table_is_remembered_until_the_table_changes():
    encoder, decoder = hpack.Encoder(), HeaderDecoder(Limits())
    first = decoder.request(encoder.encode(GRPC))
    second = decoder.request(block := encoder.encode(GRPC))
    assert second is not first
    assert decoder.request(block) is second
    decoder.request(encoder.encode([*GRPC, ("x", "new")]))
    assert not decoder._remembered
    moved = encoder.encode(GRPC)
    assert moved != block
    assert decoder.request(moved).path == "/a/B"


def test_the_caches_of_blocks_and_fields_are_bounded():
    decoder = HeaderDecoder(Limits())
    for i in range(1000):
        value = b"%d" % i
        decoder.request(b"\x00\x01a" + bytes((len(value),)) + value)
    assert len(decoder._remembered) <= REMEMBERED_BLOCKS
    assert len(decoder._kinds) <= 256
    kinds = FieldKinds()
    assert kinds[(b"a", bytes(1000))] is kinds[(b"a", bytes(1000))]
    assert not kinds


def test_metadata_keeps_order_and_repetition_without_pseudo_headers():
    head = request_head(as_bytes([*GRPC, ("b", "1"), ("a", "2"), ("b", "3")]), FieldKinds())
    assert head.metadata[1:] == ((b"b", b"1"), (b"a", b"2"), (b"b", b"3"))
    assert (head.path, head.problem, head.refusal, head.encoding) == ("/a/B", "", 0, b"identity")


@given(st.integers(0, 20), st.text(max_size=2000))
def test_trailers_are_printable_and_bounded_for_any_text(status, text):
    block = trailers_block(status, text)
    assert len(block) < 16_000
    decoded = dict(hpack.Decoder().decode(block))
    assert decoded["grpc-status"] == str(status)
    assert all(32 <= ord(c) < 127 for c in decoded.get("grpc-message", ""))


def test_refusals_have_their_http_status():
    assert dict(hpack.Decoder().decode(refusal_block(405))) == {":status": "405", "content-type": "text/plain"}


@pytest.mark.parametrize(
    ("text", "seconds"), [("1H", 3600.0), ("2M", 120.0), ("3S", 3.0), ("4m", 0.004), ("5u", 5e-6), ("99999999n", 0.099999999)]
)
def test_a_timeout_is_read_in_all_its_units(text, seconds):
    fields = as_bytes([*GRPC, ("grpc-timeout", text)])
    assert request_head(fields, FieldKinds()).timeout == pytest.approx(seconds)


def test_timeouts_are_not_cached_because_each_request_has_another_one():
    kinds = FieldKinds()
    for n in range(100):
        request_head(as_bytes([*GRPC, ("grpc-timeout", f"{n}m")]), kinds)
    assert len(kinds) == len(GRPC)


@cases("last", ["59999u", "5H", "x", "59999u\n", ""])
@cases("more", [[], [("x-a", "1")], [("grpc-timeout", "7S")]])
def test_a_request_with_only_a_new_timeout_is_decoded_as_if_it_came_alone(last, more):
    encoder, decoder = hpack.Encoder(), HeaderDecoder(Limits())
    decoder.request(encoder.encode([*GRPC, ("grpc-timeout", "1S")]))
    for headers in ([*GRPC, *more, ("grpc-timeout", last)], [*GRPC, ("grpc-timeout", last), *more]):
        head = decoder.request(encoder.encode(headers))
        alone = request_head(as_bytes(headers), FieldKinds())
        assert all(getattr(head, name) == getattr(alone, name) for name in PARTS)


@examples(60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["plain", "timeout", "more", "trailers", "smaller", "again"]), st.integers(1, 10**8 - 1)), max_size=200
    )
)
def test_requests_that_differ_only_in_the_timeout_are_decoded_like_any_others(blocks):
    encoder, decoder = hpack.Encoder(), HeaderDecoder(Limits())
    known = [*GRPC, ("user-agent", "grpc-go/1.76.0"), ("te", "trailers")]
    for kind, number in blocks:
        if kind == "trailers":
            decoder.bad_trailers(encoder.encode([("x-checksum", str(number))]))
            continue
        if kind == "smaller":
            encoder.header_table_size = (512, 4096)[number & 1]
        headers = [*known, *([("x-more", str(number))] if kind == "more" else [])]
        if kind != "plain":
            headers.append(("grpc-timeout", f"{5 if kind == 'again' else number}u"))
        head, alone = decoder.request(encoder.encode(headers)), request_head(as_bytes(headers), FieldKinds())
        assert all(getattr(head, name) == getattr(alone, name) for name in PARTS)


@interpreted_only("counts the calls of a method")
def test_most_requests_that_differ_only_in_the_timeout_are_not_decoded_field_by_field(monkeypatch):
    encoder, decoder = hpack.Encoder(), HeaderDecoder(Limits())
    decoded = []
    whole = decoder.fields
    monkeypatch.setattr(decoder, "fields", lambda block: decoded.append(block) or whole(block))
    for number in range(1000):
        decoder.request(encoder.encode([*GRPC, ("grpc-timeout", f"{59_000_000 + number}u")]))
    assert len(decoded) < 400


def test_a_block_that_refers_to_an_evicted_entry_is_broken():
    encoder, decoder = hpack.Encoder(), HeaderDecoder(Limits())
    for number in range(3):
        decoder.request(encoder.encode([*GRPC, ("grpc-timeout", f"{59_000_000 + number}u")]))
    block = encoder.encode([*GRPC, ("grpc-timeout", "1u")])
    decoder._table[:] = decoder._table[-1:]
    with pytest.raises(BrokenBlock):
        decoder.request(block)


@pytest.mark.parametrize("end", [b"", b"\x85", b"\xff\xff\xff\xff\x7f", b"\x04\x31\x75", b"\x01\x31", b"\x02\x31\x75\x82"])
def test_a_timeout_that_is_cut_or_followed_by_more_is_decoded_as_if_it_came_alone(end):
    encoder, decoder, other = hpack.Encoder(), HeaderDecoder(Limits()), HeaderDecoder(Limits())
    for number in range(3):
        block = encoder.encode([*GRPC, ("grpc-timeout", f"{59_000_000 + number}u")])
        decoder.request(block)
        other.request(block)
    block = decoder._expected + end
    other._expected = b""
    results = []
    for each in (decoder, other):
        try:
            head = each.request(block)
            results.append([getattr(head, name) for name in PARTS])
        except BrokenBlock as error:
            results.append([str(error)])
    assert results[0] == results[1]
