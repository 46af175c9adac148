"""Opens the page `/ui` in Debian's chromium, against a picker with faults: a closed endpoint, a hostile name, a refused reload.

    python -m tests.ui.run      exit status 0: every check passed; the screenshots are in .cache/ui

It needs chromium, npm (for axe-core) and the package playwright. Checked: every view is reached with the keyboard alone, axe-core finds
nothing serious, no request leaves the origin, the policy holds, and hostile names stay text.
"""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.cluster import Cluster, Picker
from tests.ui.vendor import rebuilt

AXE = {
    "name": "axe-core",
    "version": "4.14.1",
    "tarball_sha256": "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745",
    "files": [{"from": "axe.min.js", "to": "axe.min.js"}],
}
SHOTS = Path(".cache/ui")
VIEWS = ("Overview", "Endpoints", "Decisions", "Flow control", "Configuration", "Health")
HOSTILE = '<script>fetch("http://evil.example")</script>'
SERIOUS = ("serious", "critical")
WAIT_MS = 15_000
SETTLE_MS = 1_500
TABS_MAX = 12


def request(gateway: int, user: str) -> None:
    """Sends one request with a hostile model and fairness id through the gateway. Its answer does not matter."""
    body = json.dumps({"model": HOSTILE, "prompt": "hello " * 50, "max_tokens": 2})
    argv = ["curl", "-s", "-m", "5", "-o", "/dev/null", f"http://127.0.0.1:{gateway}/v1/completions", "-d", body]
    headers = ["-H", "content-type: application/json", "-H", f"x-llm-d-inference-fairness-id: {user}"]
    subprocess.run([*argv, *headers], check=False)


def endpoints(cluster: Cluster) -> Path:
    """Starts two servers. Returns a file with them, and with an endpoint whose port is closed."""
    fleet = cluster.fleet(2)
    file = cluster.directory / "hostile.yaml"
    rows = [
        {"name": f"server-{number}", "address": host, "port": str(port)}
        for number, (host, port) in enumerate(fleet.addresses)
    ]
    rows.append({"name": "closed", "address": "127.0.0.1", "port": "1"})
    file.write_text(json.dumps({"endpoints": rows}))
    return file


def refuse_a_reload(cluster: Cluster, picker: Picker) -> None:
    """Breaks the picker's configuration file and lets the picker load it again."""
    (config,) = cluster.directory.glob("config-*.yaml")
    config.write_text(f"{config.read_text()}\nnonsense: 1\n")
    picker.child.signal(signal.SIGHUP)


class Check:
    """Collects what is wrong."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def that(self, holds: bool, what: str) -> None:
        print(f"{'ok    ' if holds else 'WRONG '} {what}", flush=True)
        if not holds:
            self.wrong.append(what)


def visit(page: Any, name: str) -> None:
    """Opens a view with the keyboard alone: forward to its link after the page was loaded, and back from another view."""
    key = "Shift+Tab" if page.evaluate("document.activeElement.id") == "view" else "Tab"
    for _ in range(TABS_MAX):
        page.keyboard.press(key)
        if page.evaluate("document.activeElement.textContent") == name:
            page.keyboard.press("Enter")
            page.wait_for_selector(f'nav a[aria-current="page"]:text-is("{name}")', timeout=WAIT_MS)
            page.wait_for_timeout(SETTLE_MS)
            return
    raise AssertionError(f"{name} cannot be reached with {TABS_MAX} tabs")


def views(page: Any, axe: str, check: Check, shot: Callable[[str], None]) -> None:
    for name in VIEWS:
        visit(page, name)
        shot(name)
        page.evaluate(axe)
        found = page.evaluate(
            "axe.run().then((result) => result.violations.map((v) => [v.id, v.impact, v.nodes[0].html]))"
        )
        bad = [each for each in found if each[1] in SERIOUS]
        check.that(not bad, f"axe-core finds nothing serious in {name} {bad or ''}")


def main() -> int:
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("chromium is missing: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        axe = rebuilt(AXE, Path(folder))["axe.min.js"].decode()
    SHOTS.mkdir(parents=True, exist_ok=True)
    check = Check()
    with Cluster() as cluster:
        picker = cluster.picker(endpoints(cluster), workers=2)
        gateway = cluster.envoy(picker)
        browse(cluster, picker, gateway, chromium, axe, check)
    print(f"{len(check.wrong)} checks failed; screenshots in {SHOTS}")
    return int(bool(check.wrong))


def browse(cluster: Cluster, picker: Picker, gateway: int, chromium: str, axe: str, check: Check) -> None:
    """Checks the page in two browsers: light and wide, dark and as narrow as a phone."""
    from playwright.sync_api import sync_playwright

    origin = f"http://127.0.0.1:{picker.metrics}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme, width in (("light", 1300), ("dark", 390)):
            page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
            urls: list[str] = []
            troubles: list[str] = []
            page.on("request", lambda sent, urls=urls: urls.append(sent.url))
            page.on("pageerror", lambda error, troubles=troubles: troubles.append(str(error)))
            page.on("console", lambda said, troubles=troubles: said.type == "error" and troubles.append(said.text))
            begun = time.monotonic()
            page.goto(f"{origin}/ui")
            page.wait_for_selector("nav a", timeout=WAIT_MS)
            print(f"interactive after {time.monotonic() - begun:.2f} s ({scheme}, {width} px)")
            for _ in range(6):
                request(gateway, HOSTILE)
            if scheme == "light":
                refuse_a_reload(cluster, picker)
            page.wait_for_selector("text=refuses connections", timeout=WAIT_MS)
            page.wait_for_selector("text=The last reload was refused", timeout=WAIT_MS)
            views(
                page,
                axe,
                check,
                lambda name, page=page, tag=scheme: page.screenshot(path=SHOTS / f"{tag}-{name}.png", full_page=True),
            )
            visit(page, "Decisions")
            check.that(HOSTILE in page.inner_text("main"), "a hostile model stays text")
            check.that(page.locator("main script").count() == 0, "no name becomes an element")
            wide = page.evaluate("document.documentElement.scrollWidth > innerWidth")
            check.that(not wide, f"the page fits into {width} px")
            others = [url for url in urls if not url.startswith((origin, "data:"))]
            check.that(not others, f"no request leaves the origin {others or ''}")
            check.that(not troubles, f"no error and no violation of the policy {troubles or ''}")
            page.close()
        browser.close()


if __name__ == "__main__":
    sys.exit(main())
