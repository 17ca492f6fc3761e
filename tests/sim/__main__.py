"""`python -m tests.sim --seeds N [--first S]`: histories, and what is wrong with them."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
for kit in (HERE, HERE.parent / "unit"):
    sys.path.insert(0, str(kit))

from sim_history import run_seed  # noqa: E402 - the kits are found by their plain names only from here on


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.sim")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    ends: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    bad = delivered = steps = 0
    began_s = time.perf_counter()
    for seed in range(options.first, options.first + options.seeds):
        outcome = run_seed(seed)
        ends += outcome.ends
        seen += outcome.seen
        delivered, steps = delivered + outcome.delivered, steps + outcome.steps
        if outcome.wrong or options.verbose:
            print(f"seed {seed}: {outcome.virtual_s:.1f} s, {outcome.faults}, {dict(outcome.ends)}")
        for text in outcome.wrong[:4]:
            print(f"    {text[:600]}")
        bad += bool(outcome.wrong)
    took_s = time.perf_counter() - began_s
    print(f"{options.seeds} histories in {took_s:.1f} s, {steps} steps, {delivered} turns delivered, {bad} bad")
    print(f"ends {dict(ends)}; {dict(seen)}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
