"""Exports the requests of a recording as rows: for Parquet files, and as lines of JSON."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from epp.recording.records import floats, ints
from epp.recording.trace import Traced

ROWS_AT_ONCE: Final = 10_000
MISSING: Final = "--parquet needs the package pyarrow, which is not installed: pip install 'endpoint-picker[analysis]'"


def row(request: Traced) -> dict[str, Any]:
    """Returns one request as plain values. Unknown values are None."""
    decided, ended, target = request.decided, request.ended, request.target()
    first_s = ended.first_s if ended is not None and ended.first_s == ended.first_s else None
    inflight = ints(decided.inflight).tolist()
    return {
        "number": request.number,
        "id_hash": decided.id,
        "arrived_unix_s": request.at,
        "worker": request.worker,
        "config": request.config.hash if request.config is not None else None,
        "pool": decided.pool or None,
        "model": decided.model,
        "target_model": decided.target_model or decided.model,
        "flow": decided.flow,
        "objective": decided.objective,
        "priority": decided.priority,
        "streaming": decided.streaming,
        "body_bytes": decided.body_bytes,
        "max_tokens": decided.max_tokens,
        "prompt_tokens_estimated": decided.prompt_tokens,
        "block_tokens": decided.block_tokens,
        "block_hashes": decided.hashes,
        "waited_s": decided.waited_s,
        "refused": decided.refused or None,
        "endpoint": target.name if target is not None else None,
        "address": target.address if target is not None else None,
        "candidates": [member.name if member is not None else None for member in request.considered()],
        "candidates_inflight": inflight,
        "matched_blocks": floats(decided.matched).tolist() if decided.matched is not None else None,
        "scores": _scores(request),
        "status": ended.status if ended is not None else None,
        "first_token_s": first_s,
        "per_token_s": ended.per_token_s if ended is not None else None,
        "lasted_s": ended.lasted_s if ended is not None else None,
        "whole": ended.whole if ended is not None else None,
        "answer_bytes": ended.answer_bytes if ended is not None else None,
        "prompt_tokens": ended.prompt if ended is not None else None,
        "cached_tokens": ended.cached if ended is not None else None,
        "completion_tokens": ended.completion if ended is not None else None,
    }


def _scores(request: Traced) -> list[dict[str, Any]]:
    """Returns per profile its totals and the scores of its scorers that are not static."""
    named = {} if request.config is None else {profile.name: profile for profile in request.config.profiles}
    found = []
    for run in request.decided.runs:
        profile = named.get(run.profile)
        dynamic = [name for name, _, static in profile.scorers if not static] if profile is not None else []
        scores = [
            {"scorer": name, "scores": floats(values).tolist() if values is not None else None}
            for name, values in zip(dynamic, run.scores, strict=False)
        ]
        found.append({"profile": run.profile, "totals": floats(run.totals).tolist(), "picked": run.picked, "scorers": scores})
    return found


def to_jsonl(requests: Iterable[Traced], write: Callable[[bytes], object]) -> int:
    """Writes one JSON object per line; block hashes are lists of hexadecimal numbers. Returns the number of requests."""
    count = 0
    for count, request in enumerate(requests, 1):  # noqa: B007  the number of the last one
        values = row(request)
        values["block_hashes"] = [f"{value:016x}" for value in memoryview(values["block_hashes"]).cast("Q")]
        write(msgspec.json.encode(values) + b"\n")
    return count


def to_parquet(requests: Iterable[Traced], path: Path) -> int:
    """Writes a Parquet file, ROWS_AT_ONCE rows at a time. Returns the number of requests. Raises ClickException without pyarrow."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as missing:
        raise click.ClickException(MISSING) from missing
    schema = _schema(pa)
    count = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for rows in _groups(requests):
            writer.write_table(pa.Table.from_pylist(rows, schema))
            count += len(rows)
    return count


def _groups(requests: Iterable[Traced]) -> Iterator[list[dict[str, Any]]]:
    found = map(row, requests)
    while rows := list(islice(found, ROWS_AT_ONCE)):
        yield rows


def _schema(pa: Any) -> Any:
    """Returns the columns of the Parquet file, in the order of `row`."""
    kinds = {
        "number": pa.string(), "id_hash": pa.uint64(), "arrived_unix_s": pa.float64(), "worker": pa.int32(), "config": pa.string(),
        "pool": pa.string(),
        "model": pa.string(), "target_model": pa.string(), "flow": pa.uint64(), "objective": pa.uint64(), "priority": pa.int64(),
        "streaming": pa.bool_(), "body_bytes": pa.int64(), "max_tokens": pa.int64(), "prompt_tokens_estimated": pa.int64(),
        "block_tokens": pa.int32(), "block_hashes": pa.binary(), "waited_s": pa.float64(), "refused": pa.string(),
        "endpoint": pa.string(), "address": pa.string(), "candidates": pa.list_(pa.string()),
        "candidates_inflight": pa.list_(pa.int64()), "matched_blocks": pa.list_(pa.float64()),
        "scores": pa.list_(pa.struct({
            "profile": pa.string(), "totals": pa.list_(pa.float64()), "picked": pa.list_(pa.int64()),
            "scorers": pa.list_(pa.struct({"scorer": pa.string(), "scores": pa.list_(pa.float64())})),
        })),
        "status": pa.int32(), "first_token_s": pa.float64(), "per_token_s": pa.float64(), "lasted_s": pa.float64(),
        "whole": pa.bool_(), "answer_bytes": pa.int64(), "prompt_tokens": pa.int64(), "cached_tokens": pa.int64(),
        "completion_tokens": pa.int64(),
    }  # fmt: skip
    return pa.schema(list(kinds.items()))
