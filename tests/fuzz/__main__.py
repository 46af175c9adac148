"""Fuzz what reads foreign bytes: python -m tests.fuzz [TARGET ...] [--inputs N] [--seconds S]; `--replay FILE` runs one input again."""

import argparse
import json
import sys
from pathlib import Path

from tests.fuzz import campaign
from tests.fuzz.target import measured
from tests.fuzz.targets import TARGETS, write_corpus


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all where none is named"
    )
    parser.add_argument("--inputs", type=int, default=100_000, help="for each target; slow ones get a share (100,000)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target at most (60)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (1)")
    parser.add_argument("--engine", choices=("auto", "mutator", "atheris"), default="auto")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--replay", type=Path, help="run one saved input of the target that is named")
    parser.add_argument("--write-corpus", action="store_true", help="write the seeds of all targets to the corpus")
    given = parser.parse_args()
    if given.write_corpus:
        print(f"{write_corpus():,} bytes of seeds")
        return 0
    if unknown := [name for name in given.targets if name not in TARGETS]:
        parser.error(f"no target {', '.join(unknown)}: there are {', '.join(TARGETS)}")
    if given.replay is not None:
        if len(given.targets) != 1:
            parser.error("--replay takes one target")
        target, data = TARGETS[given.targets[0]], given.replay.read_bytes()
        cost = measured(target, data, traced=False)
        ratio = measured(target, data, traced=True).ratio
        print(f"nothing found: {cost.seconds * 1e3:.1f} ms, {ratio:.1f} bytes allocated per byte beyond the allowance")
        return 0
    engine = campaign.engine_available() if given.engine == "auto" else given.engine
    chosen = [TARGETS[name] for name in given.targets or TARGETS]
    reports = []
    for report in campaign.run(
        chosen, inputs=given.inputs, seconds=given.seconds, seed=given.seed, jobs=given.jobs, engine=engine
    ):
        reports.append(report)
        print(" ".join(report.line()), file=sys.stderr, flush=True)
    if given.json:
        figures = [
            {"target": r.target.name, "inputs": r.inputs, "inputs_per_s": r.inputs / (r.seconds or 1), "findings": r.findings,
             "slowest_ms": r.slowest_s * 1e3, "allocated_per_byte": r.ratio, "deaths": r.deaths}
            for r in reports
        ]  # fmt: skip
        print(json.dumps({"engine": engine, "targets": figures}))
    else:
        print(f"engine: {engine}\n{campaign.table(reports)}")
    return 1 if any(report.findings for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
