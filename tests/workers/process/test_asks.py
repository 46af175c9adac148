"""Commands for the parent: a file that appears whole, is read once, and comes from the parent's own user."""

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epp.decision.tryout import BY_FLOW, Share
from workers.process.asks import LATE_S, Ask, AskRefused, path_of, put, take

TRY = Ask("try", "plugins: []", "c.yaml", Share(50_000, BY_FLOW))


@given(st.text(), st.text(max_size=100), st.integers(0, 1_000_000))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_command_is_taken_once_as_it_was_put(tmp_path: Path, text: str, source: str, share: int) -> None:
    ask = Ask("try", text, source, Share(share))
    put(str(tmp_path), "one", ask)
    assert take(str(tmp_path), "other") is None
    assert take(str(tmp_path), "one") == ask
    assert take(str(tmp_path), "one") is None
    assert list(tmp_path.iterdir()) == []


def test_a_command_replaces_no_other_one_unless_that_was_left_behind(tmp_path: Path) -> None:
    put(str(tmp_path), "one", TRY)
    with pytest.raises(AskRefused, match="another command waits"):
        put(str(tmp_path), "one", Ask("rollback"))
    left = os.stat(tmp_path).st_mtime - 2 * LATE_S
    os.utime(path_of(str(tmp_path), "one"), (left, left))
    put(str(tmp_path), "one", Ask("promote"))
    assert take(str(tmp_path), "one") == Ask("promote")


def test_a_command_that_was_left_behind_is_not_obeyed(tmp_path: Path) -> None:
    put(str(tmp_path), "one", TRY)
    left = os.stat(tmp_path).st_mtime - 2 * LATE_S
    os.utime(path_of(str(tmp_path), "one"), (left, left))
    assert take(str(tmp_path), "one") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("blob", [b"", b"\xc1", msgspec.msgpack.encode(["delete", "", "", [0, "flow"]])])
def test_a_file_that_is_no_command_is_refused_and_removed(tmp_path: Path, blob: bytes) -> None:
    path = Path(path_of(str(tmp_path), "one"))
    path.write_bytes(blob)
    with pytest.raises(AskRefused, match="another version"):
        take(str(tmp_path), "one")
    assert not path.exists()


def test_a_link_and_a_fifo_are_refused(tmp_path: Path) -> None:
    path = Path(path_of(str(tmp_path), "one"))
    path.symlink_to("/etc/passwd")
    with pytest.raises(AskRefused, match="cannot be read"):
        take(str(tmp_path), "one")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(AskRefused, match="not a file of this user"):
        take(str(tmp_path), "one")


def test_a_command_that_is_too_long_is_refused_before_it_is_put(tmp_path: Path) -> None:
    with pytest.raises(AskRefused, match="at most"):
        put(str(tmp_path), "one", Ask("try", "x" * (17 << 20)))
    assert list(tmp_path.iterdir()) == []
