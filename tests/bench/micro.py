"""Micro-benchmarks of the hot path: `python -m tests.bench.micro [--smoke] [--json]`.

Each figure is the best of several rounds, in microseconds: the one that a noisy machine disturbed least. Beside it stands its limit, if
there is one. `--smoke` runs every benchmark once, so that a broken benchmark fails.
"""

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from epp.candidates import Candidates
from epp.config.load import DEFAULT_TEXT, load
from epp.data import KV_USAGE, WAITING
from epp.decision.decide import choose, schedule
from epp.decision.pipeline import Pipeline
from epp.prefix.blocks import block_hashes
from epp.prefix.match import APPROXIMATE, PrefixMatch, prefix_match
from epp.protocol.usage import UsageScanner
from epp.request import Request
from epp.request.budget import Bucket, Budget
from epp.request.tenant_keys import parse
from epp.request.tenants import FromKey, Salts, Tenants
from loadtest.load.proto import ext_proc_pb2 as pb
from shm.budgets import BudgetRow, BudgetsSchema
from shm.prefix_index import IndexReader, IndexSchema
from shm.prefix_writer import IndexWriter
from shm.segment import Region
from tests.bench.cases import Case
from tests.bench.flow_cases import flow_cases
from tests.bench.flow_policy_cases import flow_policy_cases
from tests.bench.page_cases import page_cases
from tests.bench.prefix_cases import prefix_cases
from tests.bench.routing_zoo import FIELD_TEXT
from tests.fakes import FakePool, FakeServices, candidates
from tests.pair import Pair
from workers.worker.extproc.budgets import Budgets

KEY = "y" * 40


def pipeline(services: FakeServices, text: str = DEFAULT_TEXT) -> Pipeline:
    """Compiles and starts a configuration, as a worker does."""
    compiled = load(text, "benchmark").pipeline
    compiled.start(services)
    return compiled


class NoIndex(FakeServices):
    """An index that finds nothing and learns nothing."""

    def match(self, hashes: object) -> dict[int, int]:  # type: ignore[override]
        return {}

    def learn(self, hashes: object, owner: int) -> None:
        return None


def pool(count: int) -> FakePool:
    rng = random.Random(1)
    columns = {
        "waiting_requests": [float(rng.randrange(9)) for _ in range(count)],
        "kv_cache_usage": [rng.random() for _ in range(count)],
        "running_requests": [float(rng.randrange(99)) for _ in range(count)],
    }
    fixed = candidates(columns, tokens=[float(rng.randrange(9_999)) for _ in range(count)])

    class Pool(FakePool):
        def candidates(self, subset: object) -> Candidates:
            return Candidates(fixed.snapshot, fixed._inflight, fixed._tokens)

    return Pool(fixed)


def decisions() -> Iterator[Case]:
    default, field = pipeline(NoIndex()), pipeline(NoIndex(), FIELD_TEXT)
    for count in (8, 100, 1000):
        endpoints = pool(count)
        yield Case(f"parse and decide, 1 KB, {count} endpoints", decision(default, endpoints))
        yield Case(f"the same with the field's weights, {count}", decision(field, endpoints))
        yield from scheduling(field, endpoints.fixed, count)


def decision(compiled: Pipeline, endpoints: FakePool) -> Callable[[], None]:
    """Returns a call that goes from the bytes of a body to a decision."""
    body = msgspec.json.encode({"model": "m", "prompt": "hello " * 160, "max_tokens": 9})
    parser = compiled.wiring.parsers[0]

    def run() -> None:
        request = Request(id="r", path="/v1/completions", headers={}, now=0.0)
        parser.parse(request, "/v1/completions", body)
        try:
            choose(compiled, request, endpoints).send(None)
        except StopIteration:
            return

    return run


def scheduling(compiled: Pipeline, fixed: Candidates, count: int) -> Iterator[Case]:
    """Yields cases for three scorers and the max-score picker alone, and for a loop over endpoints that computes the same."""
    request = Request(id="r", path="/v1/completions", headers={}, now=0.0)
    blocks = np.arange(count, dtype=np.float64) % 5
    request[prefix_match(APPROXIMATE)] = PrefixMatch(blocks, np.zeros(4, np.uint64), 64)

    def run() -> object:  # like after a new scrape: no cached scores of the static scorers
        snapshot = fixed.snapshot
        snapshot.totals.clear()
        return schedule(compiled, request, Candidates(snapshot, fixed._inflight))

    waiting, usage, held = (fixed[WAITING].tolist(), fixed[KV_USAGE].tolist(), blocks.tolist())

    def loop() -> int:
        shortest, longest = min(waiting), max(waiting)
        best, picked = -1.0, 0
        for row in range(count):
            queue = (longest - waiting[row]) / (longest - shortest)
            total = 2.0 * queue + 2.0 * (1.0 - usage[row]) + 3.0 * held[row] / 4
            if total > best:
                best, picked = total, row
        return picked

    yield Case(f"schedule, 3 scorers, {count} endpoints", run)
    yield Case(f"the same by a loop over {count} endpoints", loop)


def streams() -> Iterator[Case]:
    p = Pair(pipeline(NoIndex()), pool(8), body_bytes_max=32 << 20)
    yield from whole_streams(p, "whole stream without transport")
    yield from whole_streams(with_tenants(Pair(pipeline(NoIndex()), pool(8), body_bytes_max=32 << 20)), "whole stream with tenants")
    chunk = pb.ProcessingRequest(response_body=pb.HttpBody(body=b'data: {"choices":[{"text":" hello"}]}\n\n')).SerializeToString()
    envoy = p.open()
    for message in messages_of(1000)[:3]:
        envoy.handler.message(message)

    def one_chunk() -> None:
        envoy.handler.message(chunk)
        envoy.stream.sent = b""

    yield Case("one response chunk", one_chunk)


def whole_streams(p: Pair, name: str) -> Iterator[Case]:
    for label, size in (("1 KB", 1000), ("8 KB", 8000), ("400 KB", 400_000)):
        messages = messages_of(size)

        def run(messages: list[bytes] = messages) -> None:
            envoy = p.open()
            for message in messages:
                envoy.handler.message(message)
            envoy.handler.half_closed()
            p.clock.now += 1e-4

        yield Case(f"{name}, {label}", run)


def messages_of(size: int) -> list[bytes]:
    """Returns what a gateway sends for one request with a prompt of this size, and its answer."""
    headers = pb.ProcessingRequest()
    for name, value in (
        (":method", "POST"),
        (":path", "/v1/completions"),
        ("user-agent", "x" * 20),
        ("authorization", KEY),
        ("x-request-id", "z" * 36),
    ):
        headers.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    body = pb.HttpBody(body=b'{"model":"m","prompt":"%b"}' % (b"hello " * (size // 6)), end_of_stream=True)
    response = pb.ProcessingRequest()
    response.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    answer = pb.HttpBody(body=b'{"usage":{"prompt_tokens":1,"completion_tokens":2}}', end_of_stream=True)
    messages = (headers, pb.ProcessingRequest(request_body=body), response, pb.ProcessingRequest(response_body=answer))
    return [message.SerializeToString() for message in messages]


def with_tenants(p: Pair) -> Pair:
    """Gives the streams of a pair what tenants can have: a key, a cache salt and a budget."""
    keys, _ = parse(f"acme sha256:{hashlib.sha256(KEY.encode()).hexdigest()}")
    plenty = Bucket(1e9, 1e12)
    sources = [FromKey("authorization", False, keys)]
    p.app.tenants = Tenants(sources, salts=Salts(1), budget=Budget(plenty, plenty, 1000))
    p.app.guards.hidden_headers = p.app.tenants.hidden(())
    schema = BudgetsSchema(1)
    p.app.budgets = Budgets(BudgetRow(schema, Region(memoryview(bytearray(schema.bytes))), 0, [1]), 1)
    return p


def parts() -> Iterator[Case]:
    for label, size in (("1 KB", 1000), ("8 KB", 8000), ("400 KB", 400_000)):
        prompt = random.Random(size).randbytes(size)
        yield Case(f"block hashes, {label}", lambda prompt=prompt: block_hashes(prompt, 256, 1, 2))
    schema = IndexSchema(1 << 20)
    region = Region(memoryview(bytearray(schema.bytes)))
    writer, reader = IndexWriter(schema, region), IndexReader(schema, region)
    owner = writer.new_owner()
    rng = np.random.default_rng(1)
    for blocks in (4, 32, 1600):
        known, unknown = (rng.integers(1, 2**63, blocks, dtype=np.uint64) for _ in range(2))
        writer.insert(known, owner, 1)
        yield Case(f"index match, {blocks} blocks, all held", lambda known=known: reader.match(known))
        yield Case(f"index match, {blocks} blocks, none held", lambda unknown=unknown: reader.match(unknown))
        yield Case(f"index insert, {blocks} blocks", lambda known=known: writer.insert(known, owner, 2))
    scanner = UsageScanner()
    chunk = b'data: {"id":"cmpl-1","choices":[{"index":0,"text":" hello","logprobs":null,"finish_reason":null}]}\n\n'
    yield Case("usage scan, one chunk", lambda: scanner.feed(chunk))


def measure(run: Callable[[], object], *, smoke: bool) -> float:
    """Returns the microseconds per call, the best of several rounds."""
    if smoke:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6
    count = 1
    while True:
        start = time.perf_counter()
        for _ in range(count):
            run()
        spent = time.perf_counter() - start
        if spent > 0.02:
            break
        count *= 2
    best = spent
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count):
            run()
        best = min(best, time.perf_counter() - start)
    return best / count * 1e6


def measure_all(*, match: str = "", smoke: bool = False, show: bool = True) -> dict[str, float]:
    """Measures every benchmark with `match` in its name, in microseconds."""
    figures = {}
    for group in (decisions, streams, parts, page_cases, prefix_cases, flow_cases, flow_policy_cases):
        for name, run, target, each in group():
            if match not in name:
                continue
            assert name not in figures, f"two micro-benchmarks have the name '{name}'"
            figures[name] = round(measure(run, smoke=smoke) / each, 3)
            if show:
                print(f"{name:65} {figures[name]:10.2f} us{f'   (at most {target:g})' if target else ''}", flush=True)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="micro", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="run each once, to check that it works")
    parser.add_argument("--json", action="store_true", help="print one JSON object: name -> microseconds")
    parser.add_argument("--match", default="", metavar="TEXT", help="only benchmarks with this text in their name")
    options = parser.parse_args()
    figures = measure_all(match=options.match, smoke=options.smoke, show=not options.json)
    if not figures:
        parser.error(f"no micro-benchmark has '{options.match}' in its name")
    if options.json:
        json.dump(figures, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
