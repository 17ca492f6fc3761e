"""Benchmarks: `python -m tests.bench.dataplane`, `python -m tests.bench.store`; docs/benchmarks.md says how to read them.

Run from the root of a checkout; the packages of the checkout come first, whatever is installed.
"""

import os
import sys
from pathlib import Path

# Processes are started beside gRPC's threads, and exec at once: gRPC need not warn of each.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(path) for path in (ROOT, ROOT / "proto", ROOT / "client") if str(path) not in sys.path]
