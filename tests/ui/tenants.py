"""The table of tenants on the page `/ui`, in a browser: what it shows, how it is sorted, that it follows requests, and hostile names.

`tests.ui.run` calls it.
"""

from typing import Any

from tests.e2e.cluster import COMPLETIONS, LOOPBACK, Cluster, ask, completion
from tests.e2e.conftest import FAST
from tests.ui.checks import SHOTS, WAIT_MS, Check, fits, serious

CONFIG = """\
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- {{type: queue-scorer}}
- {{type: file-discovery, parameters: {{path: {file}}}}}
dataLayer: {{discovery: {{endpoints: {{pluginRef: file-discovery}}}}}}
tenants:
  from: [{{header: x-tenant, trusted: true}}]
  perTenant: {{limited: {{budget: {{requests: 2}}}}}}
"""
IMAGE = "<img src=x onerror=\"document.title='taken'\">"  # in an element, it would run
SCRIPT = "<script>document.title='taken'</script>"
QUOTES = "\"'><svg onload=document.title='taken'>"
TABLE = "[aria-label^=Tenants]"
MARKS = " \u25be\u25b4"  # beside the title of the column by which the table is sorted
NAMES = f"[...document.querySelectorAll({f'{TABLE} tbody th'!r})].map((each) => each.textContent)"


def browse_tenants(chromium: str, axe: str, check: Check) -> None:
    """Checks the table in a browser."""
    from playwright.sync_api import sync_playwright

    with Cluster() as cluster:
        fleet = cluster.fleet(2, *FAST)
        picker = cluster.picker(fleet.file, workers=2, config_text=CONFIG.format(file=fleet.file))
        port = cluster.envoy(picker)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for width in (1300, 390):
                page = browser.new_page(viewport={"width": width, "height": 900})
                page.goto(f"http://{LOOPBACK}:{picker.metrics}/ui")
                if width == 1300:
                    page.wait_for_selector("text=No tenant has sent a request yet.", timeout=WAIT_MS)
                    _follows(page, port, check)
                page.wait_for_selector("caption:text-is('Tenants, last hour')", timeout=WAIT_MS)
                bad = serious(page, axe)
                good = not bad and fits(page)
                check.that(good, f"axe-core finds nothing serious beside the table of tenants at {width} px, and it fits {bad or ''}")
                page.screenshot(path=SHOTS / f"tenants-{width}.png", full_page=True)
                page.close()
            browser.close()


def _send(port: int, tenant: str, count: int = 1, words: int = 10) -> None:
    for _ in range(count):
        ask(port, COMPLETIONS, completion("hello " * words, max_tokens=2), {"x-tenant": tenant})


def _follows(page: Any, port: int, check: Check) -> None:
    """Sends requests while the page is open, and checks what the table makes of them."""
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda said: said.type == "error" and troubles.append(said.text))
    title = page.title()
    for number, tenant in enumerate((IMAGE, SCRIPT, QUOTES)):
        _send(port, tenant, words=10 * (number + 1))
    _send(port, "limited", 5, words=100)
    check.that(becomes(page, ["limited", QUOTES, SCRIPT, IMAGE]), f"tenants with the most tokens come first {page.evaluate(NAMES)}")
    row = page.locator("tbody tr", has=page.locator("th:text-is('limited')"))
    titles = page.locator(f"{TABLE} thead th").all_inner_texts()
    shown = dict(zip([each.strip(MARKS) for each in titles], row.locator("th, td").all_inner_texts(), strict=True))
    counts = {name: shown[name] for name in ("Requests", "Over budget", "Refused")}
    check.that(counts == {"Requests": "2", "Over budget": "3", "Refused": "3"}, f"a row has requests and refusals of its tenant {counts}")
    _send(port, IMAGE, words=1000)
    check.that(becomes(page, [IMAGE, "limited", QUOTES, SCRIPT]), f"the order follows new requests {page.evaluate(NAMES)}")
    click(page, "Tenant", "ascending", check)
    by_name = page.evaluate(f"{NAMES}.sort((a, b) => a.localeCompare(b, undefined, {{numeric: true}}))")
    check.that(page.evaluate(NAMES) == by_name, f"a click sorts by name {page.evaluate(NAMES)}")
    click(page, "Refused", "descending", check)
    check.that(page.evaluate(NAMES)[0] == "limited", f"a click sorts by what was refused {page.evaluate(NAMES)}")
    click(page, "Refused", "ascending", check)
    check.that(page.evaluate(NAMES)[-1] == "limited", f"a second click turns the order round {page.evaluate(NAMES)}")
    inside = page.locator("main img, main script, main svg[onload]").count()
    check.that(not inside and page.title() == title, f"hostile names of tenants stay text: {inside} elements, title {page.title()!r}")
    check.that(not troubles, f"no error on the page of tenants {troubles or ''}")


def click(page: Any, column: str, sort: str, check: Check) -> None:
    """Clicks on the title of a column, and checks that it alone says how the table is sorted."""
    page.click(f"{TABLE} thead button:has-text('{column}')")
    said = page.locator(f"{TABLE} th[aria-sort]")
    found = [(each.inner_text().strip(MARKS), each.get_attribute("aria-sort")) for each in said.all()]
    check.that(found == [(column, sort)], f"the table says how it is sorted {found}")


def becomes(page: Any, names: list[str]) -> bool:
    """Waits until the table lists these tenants in this order. Returns whether it did."""
    for _ in range(40):
        if page.evaluate(NAMES) == names:
            return True
        page.wait_for_timeout(250)
    return False
