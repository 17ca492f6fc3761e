"""The kits of the fault matrix, of the end-to-end and of the unit tests are used here by their plain names."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
for kit in ("unit", "e2e", "faults"):
    if str(TESTS / kit) not in sys.path:
        sys.path.append(str(TESTS / kit))
