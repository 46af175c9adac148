"""Fuzz the parsers of foreign bytes: python -m tests.fuzz [TARGET ...] [--inputs N] [--seconds S]; `--replay FILE` runs one input again."""

import argparse
import json
import sys
from pathlib import Path

from tests.fuzz import campaign
from tests.fuzz.target import measure
from tests.fuzz.targets import TARGETS, write_corpus


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"one of {', '.join(TARGETS)} (default: all)")
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs per target; slow targets get a share (100,000)")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit per target (60)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (1)")
    parser.add_argument("--engine", choices=("auto", "mutator", "atheris"), default="auto")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--replay", type=Path, help="run one saved input of the named target")
    parser.add_argument("--write-corpus", action="store_true", help="write the seeds of all targets into the corpus")
    options = parser.parse_args()
    if options.write_corpus:
        print(f"{write_corpus():,} bytes of seeds")
        return 0
    if unknown := [name for name in options.targets if name not in TARGETS]:
        parser.error(f"no target {', '.join(unknown)}; valid targets: {', '.join(TARGETS)}")
    if options.replay is not None:
        if len(options.targets) != 1:
            parser.error("--replay needs exactly one target")
        target, data = TARGETS[options.targets[0]], options.replay.read_bytes()
        cost = measure(target, data, traced=False)
        ratio = measure(target, data, traced=True).ratio
        print(f"no finding: {cost.seconds * 1e3:.1f} ms, {ratio:.1f} bytes allocated per byte beyond the allowance")
        return 0
    engine = campaign.engine_available() if options.engine == "auto" else options.engine
    chosen = [TARGETS[name] for name in options.targets or TARGETS]
    reports = []
    for report in campaign.run(chosen, inputs=options.inputs, seconds=options.seconds, seed=options.seed, jobs=options.jobs, engine=engine):
        reports.append(report)
        print(" ".join(report.line()), file=sys.stderr, flush=True)
    if options.json:
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
