"""Whole nodes over CNICs: the kits of the unit and of the contract tests are used here by their plain names."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
for kit in ("unit", "contract"):
    if str(TESTS / kit) not in sys.path:
        sys.path.append(str(TESTS / kit))
