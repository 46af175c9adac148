"""Files of API keys: which lines they may have, and whose key is whose."""

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.request import tenant_keys
from epp.request.client_headers import names_tenant
from epp.request.tenant_keys import ACCEPTED_MAX, FAULTS_MAX, Fault, parse
from tests.cases import cases

NAMES = st.text(min_size=1, max_size=70).map(str.strip).filter(lambda name: "\n" not in name)


def hashed(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def faults(text: str) -> list[Fault]:
    return parse(text)[1]


def test_a_key_names_its_tenant_with_and_without_the_word_bearer() -> None:
    text = f"# keys\n\nacme {hashed('one')}\r\nacme\t{hashed('two')}  # laptop\nbig corp   {hashed('3')}"
    keys, found = parse(text)
    assert found == []
    assert [keys.tenant(value) for value in ("one", "two", "3")] == ["acme", "acme", "big corp"]
    assert [keys.tenant(value) for value in ("Bearer one", "bearer  two ", "BEARER 3")] == ["acme", "acme", "big corp"]
    assert [keys.tenant(value) for value in ("", "Bearer ", "One", "one two", "Basic one", hashed("one"), "Bearerone")] == [""] * 7
    assert keys.text == text


def test_the_digits_of_a_hash_may_be_upper_case() -> None:
    keys, found = parse("a sha256:" + hashlib.sha256(b"k").hexdigest().upper())
    assert (found, keys.tenant("k")) == ([], "a")


def test_every_key_is_compared_in_constant_time_also_one_that_is_like_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    keys, _ = parse(f"a {hashed('x')}")
    monkeypatch.setattr(tenant_keys.hmac, "compare_digest", compare)
    assert [keys.tenant("x"), keys.tenant("y")] == ["a", ""]
    assert compared == [(32, 32)] * 2


def test_a_right_key_is_hashed_once_and_a_wrong_one_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return one == other

    keys, _ = parse(f"a {hashed('x')}\nb {hashed('y')}")
    monkeypatch.setattr(tenant_keys.hmac, "compare_digest", compare)
    assert [keys.tenant(value) for value in ("x", "Bearer x", "y", "z") for _ in range(3)] == ["a"] * 6 + ["b"] * 3 + [""] * 3
    assert len(compared) == 1 + 1 + 1 + 3
    assert {len(fast) for fast in keys._accepted} == {16}, "no key is kept, only a hash"


def test_new_keys_remember_none_of_the_earlier_ones() -> None:
    before, _ = parse(f"a {hashed('x')}")
    assert before.tenant("x") == "a"
    after, _ = parse(f"a {hashed('y')}")
    assert after.tenant("x") == ""


def test_no_more_than_a_number_of_spellings_of_a_key_are_remembered() -> None:
    keys, _ = parse(f"a {hashed('x')}")
    assert {keys.tenant("Bearer " + " " * blanks + "x") for blanks in range(ACCEPTED_MAX + 2)} == {"a"}
    assert len(keys._accepted) == 2


HASH = hashed("k")


@cases(
    ("line", "why"),
    [
        (HASH, "the tenant is missing"),
        ("acme", "a line has a tenant and a hash"),
        ("acme sk-secret", "there is no hash of a key"),
        ("acme md5:abc", "there is no hash of a key"),
        ("acme SHA256:" + HASH[7:], "there is no hash of a key"),
        (f"acme {HASH} laptop", "there is no hash of a key"),
        (HASH + " acme", "there is no hash of a key"),
        (f"acme {HASH}0", "sha256: is not followed by 64 hexadecimal digits"),
        (f"acme {HASH[:-1]}g", "sha256: is not followed by 64 hexadecimal digits"),
        ("acme sha256:", "sha256: is not followed by 64 hexadecimal digits"),
        ("x" * 65 + " " + HASH, "the tenant's name is not valid"),
        ("default-flow " + HASH, "the tenant's name is not valid"),
        ("a\x07b " + HASH, "the tenant's name is not valid"),
    ],
)
def test_a_wrong_line_is_a_fault_with_its_number_and_what_to_write(line: str, why: str) -> None:
    (fault,) = faults(f"# first\n{line}\nother {hashed('o')}\n")
    assert (fault.line, fault.why) == (2, why)
    assert fault.hint


def test_no_fault_shows_a_part_of_its_line() -> None:
    for line in ("acme sk-secret-key", "sk-secret-key", "sk-secret-key acme", f"sk-secret-key{'x' * 64} {HASH}"):
        assert "sk-secret" not in str(faults(line))


def test_a_fault_about_a_plain_key_says_how_to_make_its_hash() -> None:
    (fault,) = faults("acme sk-secret")
    assert fault.hint == "write TENANT sha256:HEX, where HEX comes from: printf %s KEY | sha256sum"


@pytest.mark.parametrize("second", ["acme", "other"])
def test_the_same_key_twice_is_a_fault_whoever_it_belongs_to(second: str) -> None:
    (fault,) = faults(f"acme {HASH}\n\n{second} {HASH.upper().replace('SHA256', 'sha256')}")
    assert (fault.line, fault.why) == (3, "the same key as in line 1")


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n  # more"])
def test_a_file_without_a_key_is_a_fault_of_the_whole_file(text: str) -> None:
    (fault,) = faults(text)
    assert (fault.line, fault.why) == (0, "the file has no key")


def test_the_number_of_faults_is_bounded() -> None:
    assert len(faults("x\n" * 1000)) == FAULTS_MAX


def test_keys_whose_hashes_begin_alike_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_keys, "BUCKET_BYTES", 0)
    keys, _ = parse(f"a {hashed('1')}\nb {hashed('2')}\nc {hashed('3')}")
    assert [keys.tenant(key) for key in "1234"] == ["a", "b", "c", ""]


@given(st.dictionaries(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1), NAMES, min_size=1, max_size=8))
def test_what_is_written_is_read_and_nothing_else(entries: dict[str, str]) -> None:
    usable = {key: name for key, name in entries.items() if names_tenant(name) and name[0] != "#" and " #" not in name}
    usable = {key: " ".join(name.split()) for key, name in usable.items()}
    keys, found = parse("\n".join(f"{name} {hashed(key)}" for key, name in usable.items()))
    assert [fault.line for fault in found] == ([] if usable else [0])
    read: dict[str, Any] = {key: keys.tenant(key) for key in entries}
    assert read == {key: usable.get(key, "") for key in entries}


@given(st.text(st.sampled_from("ab #\t\r\n0:sha256") | st.characters(), max_size=200))
def test_any_text_is_read_or_has_faults_in_lines_that_exist(text: str) -> None:
    _, found = parse(text)
    assert all(0 <= fault.line <= text.count("\n") + 1 and fault.why and fault.hint for fault in found)
