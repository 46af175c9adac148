"""Opens the page `/ui` in Debian's chromium, against a picker with ten faults (`tests.faults.ten`) and hostile names.

    python -m tests.ui.run      exit status 0: every check passed; the screenshots are in .cache/ui

It needs chromium, npm (for axe-core) and the package playwright. Checked: page and doctor name all ten faults, every view is reached with
the keyboard alone, axe-core finds nothing serious, no request leaves the origin, the policy holds, and hostile names stay text. The pages
of several pools and of tenants (`tests.ui.tenants`) are opened, too.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.cluster import COMPLETIONS, LOOPBACK, Cluster, ask, eventually
from tests.e2e.pools_site import Site
from tests.faults.ten import FAULTS, HOT, Ten, missed, ten_faults
from tests.ui.checks import SHOTS, WAIT_MS, Check, fits, serious
from tests.ui.tenants import browse_tenants
from tests.ui.vendor import rebuilt

AXE = {
    "name": "axe-core",
    "version": "4.14.1",
    "tarball_sha256": "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745",
    "files": [{"from": "axe.min.js", "to": "axe.min.js"}],
}
VIEWS = ("Overview", "Endpoints", "Decisions", "Flow control", "Configuration", "Health")
SCRIPT = '<script>fetch("http://evil.example")</script>'
HOSTILE = f"{SCRIPT}\u202e\x07\x00{'x' * 10_000}"  # a script, other direction of text, control characters, 10 KB
ENDPOINT = {"name": f"{SCRIPT}\u202e{'y' * 400}", "address": LOOPBACK, "port": "1"}
SETTLE_MS = 700
TABS_MAX = 12


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


def back(page: Any) -> None:
    """Returns from one decision or receipt to the list, and waits until the view has the focus: `visit` counts tabs from there."""
    page.click("text=Back to the latest decisions")
    page.wait_for_selector("text=Latest decisions", timeout=WAIT_MS)
    page.wait_for_function("document.activeElement.id === 'view'", timeout=WAIT_MS)


def views(page: Any, axe: str, check: Check, shot: Callable[[str], None]) -> None:
    for name in VIEWS:
        visit(page, name)
        shot(name)
        check.that(fits(page), f"{name} fits")
        bad = serious(page, axe)
        check.that(not bad, f"axe-core finds nothing serious in {name} {bad or ''}")


def details(page: Any, axe: str, receipt: str, check: Check, shot: Callable[[str], None]) -> None:
    """Opens one endpoint, one decision with other weights, and a receipt."""
    visit(page, "Endpoints")
    page.click('a[title="slow"]')
    page.wait_for_selector("text=The last scrape failed", timeout=WAIT_MS)
    shot("One endpoint")
    visit(page, "Decisions")
    flow = page.locator("thead th", has_text="Flow").bounding_box()
    check.that(flow["x"] + flow["width"] <= page.viewport_size["width"], "target and flow of a decision show first")
    page.fill('input[name="receipt"]', receipt)
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Runner-up", timeout=WAIT_MS)
    shot("Receipt")
    check.that("(an endpoint that has left)" not in page.inner_text("main"), "a receipt names its endpoints")
    back(page)
    page.select_option("form.filters select", "sent")
    page.click("tbody a.link")
    page.wait_for_selector('input[type="range"]', timeout=WAIT_MS)
    page.locator('input[type="range"]').first.focus()
    page.keyboard.press("Home")
    page.wait_for_selector("text=With these weights", timeout=WAIT_MS)
    shot("One decision")
    bad = serious(page, axe)
    check.that(not bad, f"axe-core finds nothing serious in one decision {bad or ''}")
    check.that(fits(page), "one decision fits")
    address = page.url
    back(page)
    page.go_back()
    page.wait_for_selector('input[type="range"]', timeout=WAIT_MS)
    check.that("#decisions/id/" in address and page.url == address, "a decision has an address")
    back(page)


def main() -> int:
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("chromium is missing: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        axe = rebuilt(AXE, Path(folder))["axe.min.js"].decode()
    SHOTS.mkdir(parents=True, exist_ok=True)
    check = Check()
    with ten_faults([ENDPOINT]) as ten:
        wrong = missed(ten)
        check.that(not wrong, f"page and doctor name all {len(FAULTS)} faults {wrong or ''}")
        browse(ten, chromium, axe, check)
    with Cluster() as cluster:
        browse_pools(Site(cluster), chromium, axe, check)
    browse_tenants(chromium, axe, check)
    print(f"{len(check.wrong)} checks failed; screenshots in {SHOTS}")
    return int(bool(check.wrong))


def browse(ten: Ten, chromium: str, axe: str, check: Check) -> None:
    """Checks the page in two browsers: light and wide, dark and as narrow as a phone."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme, width in (("light", 1300), ("dark", 390)):
            page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
            look(ten, page, f"{scheme}, {width} px", axe, check)
            page.close()
        browser.close()


def browse_pools(site: Site, chromium: str, axe: str, check: Check) -> None:
    """Checks the page of a picker of several pools: the list first, then every view of one pool."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        troubles: list[str] = []
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda said: said.type == "error" and troubles.append(said.text))
        page.goto(f"http://{LOOPBACK}:{site.picker.metrics}/ui")
        page.wait_for_selector('nav a[aria-current="page"]:text-is("Pools")', timeout=WAIT_MS)
        names = page.locator("tbody th a").all_inner_texts()
        check.that(names == sorted(site.addresses), f"the page begins with all pools {names}")
        page.screenshot(path=SHOTS / "pools.png", full_page=True)
        for name in ("Pools", "Endpoints", "Decisions", "Configuration", "Health"):
            visit(page, name)
            bad = serious(page, axe)
            check.that(not bad and fits(page), f"axe-core finds nothing serious in {name} of all pools, and it fits {bad or ''}")
        visit(page, "Pools")
        page.click('tbody a:text-is("big")')
        page.wait_for_selector('nav a[aria-current="page"]:text-is("Overview")', timeout=WAIT_MS)
        page.wait_for_selector(".plots figure, .plots canvas", timeout=WAIT_MS)
        plotted = page.locator(".plots canvas").count()
        check.that(plotted >= 5, f"a pool has plots of its own history ({plotted})")
        page.screenshot(path=SHOTS / "pool.png", full_page=True)
        page.locator("main").focus()
        for name in ("Endpoints", "Decisions", "Flow control", "Configuration", "Health"):
            visit(page, name)
            bad = serious(page, axe)
            check.that(not bad and fits(page), f"axe-core finds nothing serious in {name} of one pool, and it fits {bad or ''}")
            shown = page.inner_text("main")
            others = [each for pool, mine in site.addresses.items() if pool != "big" for each in mine if each in shown]
            check.that(not others and "pool big" in page.inner_text("h1"), f"{name} shows only this pool {others or ''}")
        visit(page, "Endpoints")
        check.that(all(each in page.inner_text("main") for each in site.addresses["big"]), "a pool has its endpoints")
        visit(page, "Pools")
        check.that("3 pools" in page.inner_text("h1"), "the list of pools is that of all again")
        check.that(not troubles, f"no error on the page of several pools {troubles or ''}")
        browser.close()


def look(ten: Ten, page: Any, how: str, axe: str, check: Check) -> None:
    """Visits every view in one browser."""
    origin = f"http://{LOOPBACK}:{ten.picker.metrics}"
    urls: list[str] = []
    troubles: list[str] = []
    page.on("request", lambda sent: urls.append(sent.url))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda said: said.type == "error" and troubles.append(said.text))
    begun = time.monotonic()
    page.goto(f"{origin}/ui")
    page.wait_for_selector("nav a", timeout=WAIT_MS)
    print(f"interactive after {time.monotonic() - begun:.2f} s ({how})")
    receipt = traffic(ten)

    def shot(name: str) -> None:
        page.screenshot(path=SHOTS / f"{how.partition(',')[0]}-{name}.png", full_page=True)

    views(page, axe, check, shot)
    shown = eventually(lambda: HOT in page.inner_text("main") and SCRIPT in page.inner_text("main"))
    check.that(shown, "hostile tenants and endpoints stay text")
    details(page, axe, receipt, check, shot)
    visit(page, "Decisions")
    # The page asks for the latest decisions every 2 s, and those of others soon push a decision off the list. So this needs some tries.
    shown = eventually(lambda: bool(traffic(ten)) and SCRIPT in page.inner_text("main"), 60.0)
    check.that(shown, "a hostile model stays text")
    check.that(page.locator("main script").count() == 0, "no name becomes an element")
    longest = max(map(len, page.inner_text("main").split("\n")))
    check.that(longest < 1000, f"a name of 10 KB is cut: at most {longest} characters a line")
    others = [url for url in urls if not url.startswith((origin, "data:"))]
    check.that(not others, f"no request leaves the origin {others or ''}")
    check.that(not troubles, f"no error and no violation of the policy {troubles or ''}")


def traffic(ten: Ten) -> str:
    """Sends requests with hostile models and a hostile tenant. Returns the receipt of another one."""
    for model in (HOSTILE, SCRIPT):
        body = json.dumps({"model": model, "prompt": "hello " * 50, "max_tokens": 2}).encode()
        curl(ten, body)
    asked = {"x-llm-d-debug": "receipt", "x-llm-d-inference-fairness-id": "someone"}
    body = json.dumps({"model": "sim-model", "prompt": "hello " * 50, "max_tokens": 2}).encode()
    return ask(ten.gateway, COMPLETIONS, body, asked).headers["x-llm-d-receipt"]


def curl(ten: Ten, body: bytes) -> None:
    """Sends a request of a hostile tenant. Its answer does not matter."""
    argv = ["curl", "-s", "-m", "20", "-o", "/dev/null", f"http://{LOOPBACK}:{ten.gateway}{COMPLETIONS}", "-d", "@-"]
    headers = ["-H", "content-type: application/json", "-H", f"x-llm-d-inference-fairness-id: {SCRIPT}"]
    subprocess.run([*argv, *headers], check=False, input=body)


if __name__ == "__main__":
    sys.exit(main())
