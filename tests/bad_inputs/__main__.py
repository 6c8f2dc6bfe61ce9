"""Draw bad inputs and say how each ended; the exit status is 1 where one did not end as it must."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from itertools import islice
from pathlib import Path

from tests.bad_inputs.draw import draw_cases
from tests.bad_inputs.judge import GIGABYTES, SECONDS, Case, judge
from tests.bad_inputs.runs import RUN


def main() -> int:
    """Run the cases."""
    parser = argparse.ArgumentParser(prog="python -m tests.bad_inputs", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="what the cases are drawn with")
    parser.add_argument("--cases", type=int, default=500, help="how many")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--kind", default="", help="cases of one kind")
    parser.add_argument("--verbose", action="store_true", help="print every case")
    asked = parser.parse_args()
    statuses: Counter[str] = Counter()
    slowest, failed, number = 0.0, 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        made = judge(Case("the run that others damage", RUN, status=(0,)), run)
        assert made.status == 0, made.line
        cases = islice(draw_cases(random.Random(asked.seed), run, asked.kind), asked.cases)
        for number, (kind, case) in enumerate(cases, 1):
            if asked.only not in case.name:
                continue
            verdict = judge(case, Path(scratch) / str(number))
            statuses[f"{kind}, status {verdict.status}"] += 1
            slowest = max(slowest, verdict.seconds)
            failed += bool(verdict.faults)
            if verdict.faults or asked.verbose:
                mark = "; ".join(verdict.faults) or "ok"
                print(
                    f"[{number}] {kind}: {case.name}\n    {mark} · {verdict.seconds:.1f} s · {verdict.line}", flush=True
                )
    for name, count in sorted(statuses.items()):
        print(f"{count:5d}  {name}")
    print(f"{sum(statuses.values())} cases of seed {asked.seed}; not in one line, or with another status: {failed}")
    print(f"the slowest took {slowest:.1f} of {SECONDS} s; each was given {GIGABYTES} GiB beyond the imports")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
