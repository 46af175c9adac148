"""Uses a picker's pages during faults: scrapes the metrics page, and sends a health probe every 100 ms."""

import asyncio
import math
from collections import Counter

from tests.faults.client import Connection, Lost, header_block

SCRAPE_EVERY_S = 0.25
PROBE_EVERY_S = 0.1
ANSWER_S = 10.0
TRIES = 5
CHECK = header_block("/grpc.health.v1.Health/Check")
SERVING = b"\x08\x01"
EMPTY = bytes(5)  # a HealthCheckRequest for the whole server, with its length prefix


class Scraper:
    """Scrapes like Prometheus and compares every counter with its last value."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.pages = 0
        self.cut = 0  # scrapes that were cut by the supervisor's death
        self.failed: list[str] = []
        self.fallen: list[str] = []  # counters that decreased
        self._last: dict[str, float] = {}

    async def run(self) -> None:
        while True:
            await self.scrape()
            await asyncio.sleep(SCRAPE_EVERY_S)

    async def scrape(self) -> None:
        for _ in range(TRIES):
            try:
                async with asyncio.timeout(ANSWER_S):
                    page = await self._page()
            except ConnectionRefusedError as refused:
                self.failed.append(str(refused))
                return
            except TimeoutError:
                self.failed.append(f"no page within {ANSWER_S:g} s")
                return
            except OSError:
                page = ""
            if page:
                self.pages += 1
                self._compare(page)
                return
            self.cut += 1
        self.failed.append(f"cut {TRIES} times in a row")

    async def _page(self) -> str:
        """Reads the page. Returns an empty string if the connection was cut."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            answer = await reader.read()
        finally:
            writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return body.decode() if head.startswith(b"HTTP/1.1 200") else ""

    def _compare(self, page: str) -> None:
        kinds: dict[str, str] = {}
        for line in page.splitlines():
            if line.startswith("# TYPE "):
                name, kind = line.split()[2:4]
                kinds[name] = kind
            elif line and line[0] != "#":
                key, _, text = line.rpartition(" ")
                name = key.partition("{")[0]
                family = name
                for suffix in ("_total", "_bucket", "_count", "_sum"):
                    family = family.removesuffix(suffix) if family not in kinds else family
                if kinds.get(family) in ("counter", "histogram"):
                    value, before = float(text), self._last.get(key, -math.inf)
                    if value < before - 1e-9:
                        self.fallen.append(f"{key} {before:g} -> {value:g}")
                    self._last[key] = value


class Prober:
    """Probes the health like a gateway: with a new connection every time."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.answers: Counter[str] = Counter()

    async def run(self) -> None:
        while True:
            self.answers[await self.probe()] += 1
            await asyncio.sleep(PROBE_EVERY_S)

    async def probe(self) -> str:
        """Sends one probe. Returns the result: serving, not serving, refused, silent, or cut (by the supervisor's death)."""
        connection: Connection | None = None
        try:
            async with asyncio.timeout(ANSWER_S):
                _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", self.port)
                stream = connection.open(CHECK)
                stream.send(EMPTY, last=True)
                answers = await stream.take(1)
                return "serving" if answers == [SERVING] else "not serving"
        except ConnectionRefusedError:
            return "refused"
        except TimeoutError:
            return "silent"
        except (Lost, OSError):
            return "cut"
        finally:
            if connection is not None:
                await connection.close()
