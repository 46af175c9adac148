"""What outsiders see of a picker while it is hurt: its metrics page again and again, and its health every 100 ms."""

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
EMPTY = bytes(5)  # a HealthCheckRequest for the whole server, with its prefix


class Scraper:
    """Scrapes like Prometheus and holds every counter against its last value."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.pages = 0
        self.cut = 0  # scrapes that were under way when the supervisor died
        self.failed: list[str] = []
        self.fallen: list[str] = []  # counters that went down
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
        self.failed.append(f"cut {TRIES} times running")

    async def _page(self) -> str:
        """Empty if the connection was cut."""
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
    """Asks for health like a gateway: a new connection every time."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.answers: Counter[str] = Counter()

    async def run(self) -> None:
        while True:
            self.answers[await self.probe()] += 1
            await asyncio.sleep(PROBE_EVERY_S)

    async def probe(self) -> str:
        """serving, not serving, refused, silent, or cut: under way when the supervisor died."""
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
