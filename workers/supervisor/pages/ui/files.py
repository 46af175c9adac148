"""Serves the files of the page `/ui`.

All files are in the package, so the page works offline. The policy allows scripts, styles and connections of the own origin only, and
neither inline scripts nor inline styles. A file is sent in pieces, so it is compressed and waits for its turn like every long page.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from workers.supervisor.pages.page import Page, PageAnswer, Piece, Request

FOLDER: Final = Path(__file__).parent / "static"
INDEX: Final = "index.html"
PIECE_BYTES: Final = 32 << 10
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
}
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
FIELDS: Final = (
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-cache"),
)


def file_pages() -> dict[str, Page]:
    """Returns a page for each file by path: /ui and /ui/..."""
    pages: dict[str, Page] = {}
    for file in sorted(FOLDER.rglob("*")):
        if file.suffix in TYPES:
            name = file.relative_to(FOLDER).as_posix()
            pages["/ui" if name == INDEX else f"/ui/{name}"] = functools.partial(_page, file)
    return pages


def _page(file: Path, _request: Request) -> PageAnswer:
    return PageAnswer(_pieces(file), TYPES[file.suffix], fields=FIELDS)


def _pieces(file: Path) -> Iterator[Piece]:
    data = file.read_bytes()
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]
