"""The data plane's figures, each beside its reference of the same round: docs/benchmarks.md says how to read them."""

from __future__ import annotations

import sys

from tests.bench.families import FAMILIES, wakeup
from tests.bench.suite import Suite

SUITE = Suite(
    "dataplane",
    doc=__doc__,
    families=FAMILIES,
    profiled=tuple(name for measure, names in FAMILIES.items() if measure is not wakeup for name in names),
    disk_gb=8,
)
NAMES = SUITE.names

if __name__ == "__main__":
    sys.exit(SUITE.main())
