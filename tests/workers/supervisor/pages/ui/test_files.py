"""The files of the page: what they load, how they are served, and that the libraries are what they say."""

import gzip
import hashlib
import json
import re
from http import HTTPStatus

from workers.supervisor.pages.page import Request
from workers.supervisor.pages.ui.files import FOLDER, POLICY, file_pages

LOCAL = Request("GET", "/ui", peer="127.0.0.1", host="localhost:9090")
PAGES = file_pages()
FIRST_PAINT_BYTES_MAX = 150 << 10


def body(path: str) -> bytes:
    answer = PAGES[path](LOCAL)
    assert not isinstance(answer.body, bytes)
    return b"".join(piece for piece in answer.body if isinstance(piece, bytes))


def test_every_file_has_a_type_and_the_policy() -> None:
    for path, page in PAGES.items():
        answer = page(LOCAL)
        assert answer.status is HTTPStatus.OK, path
        assert ("Content-Security-Policy", POLICY) in answer.fields
        assert ("X-Content-Type-Options", "nosniff") in answer.fields
        assert answer.content_type.startswith("text/")
        assert body(path)


def test_the_policy_allows_nothing_inline_and_no_other_origin() -> None:
    assert "unsafe" not in POLICY
    assert not re.search(r"https?:|\*", POLICY)
    page = body("/ui").decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)", page)
    assert not re.search(r"<style|\sstyle=|\son\w+=", page)


def test_everything_that_the_page_names_is_in_the_package() -> None:
    page = body("/ui").decode()
    names = re.findall(r'(?:src|href)="(ui/[^"]+)"', page)
    assert {f"/{name}" for name in names} == PAGES.keys() - {"/ui"}
    for path in PAGES:
        if path.endswith((".js", ".mjs")):
            for name in re.findall(r'from ?"([^"]+)"', body(path).decode()):
                assert name.startswith("./"), (path, name)
                assert f"{path.rpartition('/')[0]}/{name[2:]}" in PAGES, (path, name)


def test_no_own_file_writes_html_from_text() -> None:
    for path in PAGES:
        if "/vendor/" not in path:
            assert not re.search(rb"innerHTML|outerHTML|dangerouslySet|insertAdjacent|document\.write|eval\(", body(path))


def test_the_first_paint_takes_few_bytes() -> None:
    assert sum(len(gzip.compress(body(path), 1)) for path in PAGES) < FIRST_PAINT_BYTES_MAX


def test_the_libraries_have_their_hashes_and_licences() -> None:
    vendor = FOLDER / "vendor"
    packages = json.loads((vendor / "packages.json").read_text())
    listed = {file["to"]: file["sha256"] for package in packages for file in package["files"]}
    present = {file.name for file in vendor.iterdir()} - {"packages.json"}
    assert present == set(listed)
    for name, expected in listed.items():
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == expected, name
    for package in packages:
        assert f"{package['name']}.LICENSE" in present
