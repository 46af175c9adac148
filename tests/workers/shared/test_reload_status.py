"""The status of reloads fits into its document, whatever it says."""

import pytest

from epp.decision.tryout import Share
from workers.shared import reload_status
from workers.shared.reload_status import POOL_STATUS_BYTES, POOL_TEXT_MAX, STATUS_BYTES, TEXT_MAX, ReloadStatus, TryoutStatus, fitting

WIDE = "\N{GRINNING FACE}"  # 4 bytes


def status(text: str, path: str) -> ReloadStatus:
    return ReloadStatus(7, "56a8d70ad60f", path, 1.0, text=text, tryout=TryoutStatus(8, "56a8d70ad60f", path, Share(), 1.0))


def test_a_status_that_fits_is_told_as_it_is() -> None:
    told = status("fine", "/etc/epp.yaml")
    assert fitting(told, POOL_STATUS_BYTES) == reload_status.encode(told)


@pytest.mark.parametrize(("room", "most"), [(POOL_STATUS_BYTES, POOL_TEXT_MAX), (STATUS_BYTES, TEXT_MAX)])
@pytest.mark.parametrize("path", ["/etc/epp.yaml", "/deep" * 800])
def test_a_status_that_is_too_long_loses_ends_of_its_paths_and_text(room: int, most: int, path: str) -> None:
    blob = fitting(status(most * WIDE, path), room)
    assert len(blob) <= room
    read = reload_status._decode(blob)
    assert read.text.startswith(WIDE * (most // 2))
    assert path.startswith(read.source)
    assert (read.generation, read.tryout is not None) == (7, True)
