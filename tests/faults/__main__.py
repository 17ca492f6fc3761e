"""`python -m tests.faults`: the whole matrix, or a part of it."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
for kit in (HERE, HERE.parent / "e2e", HERE.parent / "unit"):
    sys.path.insert(0, str(kit))

from fault_matrix import main  # noqa: E402 - the kits are found by their plain names only from here on

sys.exit(main())
