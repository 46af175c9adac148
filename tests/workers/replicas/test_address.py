import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from workers.replicas.address import parse_address

SECRETS = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=4, max_size=20)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://cache", "redis://cache:6379"),
        ("redis://me:pw@cache:7000/2", "redis://cache:7000"),
        ("rediss://[::1]:7000?ca=/ca.pem", "rediss://[::1]:7000"),
        ("unix:///run/valkey.sock", "unix:///run/valkey.sock"),
        ("redis+sentinel://a,b:1/mymaster/3", "redis+sentinel://a:26379,b:1/mymaster"),
        ("redis://cache?cluster=true", "redis://cache:6379"),
    ],
)
def test_an_address_is_shown_without_its_credentials(url: str, shown: str) -> None:
    address = parse_address(url)
    assert (str(address), repr(address)) == (shown, f"Address({shown})")


def test_the_parts_of_a_url_are_read() -> None:
    address = parse_address("redis://me:p%40ss@cache:7000/2")
    assert (address.user, address.password, address.database, address.tls) == ("me", "p@ss", 2, False)
    assert parse_address("unix://me:pw@/run/s?db=3").database == 3
    assert parse_address("redis+sentinel://a/m?tls=true").tls
    assert parse_address("rediss://h?cluster=true").cluster
    sentinel = parse_address("redis+sentinel://me:pw@a/m?sentinel_user=w&sentinel_password_file=/run/p")
    assert (sentinel.sentinel_user, sentinel.sentinel_password_file) == ("w", "/run/p")


@cases(
    ("url", "rule"),
    [
        ("http://cache", "must begin with one of redis://"),
        ("cache:6379", "must begin with one of"),
        ("redis://", "the host is missing"),
        ("redis://a,b", "takes one host"),
        ("redis://a:99999", "the host is missing or malformed"),
        ("redis://a/first", "the database is a number"),
        ("redis://a/1?cluster=true", "a cluster has only database 0"),
        ("redis://a?ca=x", "option 'ca' is not known for redis://"),
        ("redis://a?cluster=yes", "cluster=true or"),
        ("rediss://a?key=x", "key needs cert"),
        ("unix://host/path", "needs the path of a socket"),
        ("unix://", "needs the path of a socket"),
        ("redis+sentinel://a", "needs the name of the service"),
        ("redis://u:a#b@c", "write ? as %3F, / as %2F, # as %23"),
        ("redis://c#b", "write it as %23"),
        ("redis://[::1", "write an IPv6 address in brackets"),
    ],
)
def test_a_malformed_url_is_refused_with_the_rule(url: str, rule: str) -> None:
    with pytest.raises(ValueError, match=re.escape(rule)):
        parse_address(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:pa?topsecretword@host/0",
        "redis://u:pa?topsecretword=1&x@host/0",
        "redis://u:pa?topsecretword",
        "redis://u:pa/topsecretword@host/0",
        "redis+sentinel://u:123/topsecretword@h",
        "unix://u:1/topsecretword@/run/s",
        "redis://h?cluster=topsecretword",
    ],
)
def test_no_part_of_a_password_with_raw_signs_is_shown(url: str) -> None:
    with pytest.raises(ValueError, match=r"an .@. behind|not known|=true or") as wrong:
        parse_address(url)
    assert "topsecretword" not in str(wrong.value)


@given(SECRETS, st.text(max_size=30))
def test_no_error_shows_the_password(password: str, rest: str) -> None:
    secret = f"qq{password}qq"
    try:
        shown = str(parse_address(f"redis://u:{secret}@{rest}"))
    except ValueError as wrong:
        shown = str(wrong)
    assert secret not in shown
