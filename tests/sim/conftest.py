"""The kits of the unit tests are used here by their plain names."""

from __future__ import annotations

import sys
from pathlib import Path

UNIT = str(Path(__file__).parents[1] / "unit")
if UNIT not in sys.path:
    sys.path.append(UNIT)
