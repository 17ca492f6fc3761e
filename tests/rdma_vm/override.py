"""A traffic class that the system gives to a whole device is found: rdma_cm's default, set as an operator would, by configfs.

python -m tests.rdma_vm.override, in the VM: says as JSON what doctor finds before, with and after it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from kvmoverd.adapters.doctor.finding import Look, Wanted
from kvmoverd.adapters.doctor.lanes import check_override
from kvmoverd.adapters.sysfs.tree import Tree

CONFIGFS = Path("/sys/kernel/config")
MODEL = 0x68


def found(device: str) -> str:
    """Status and words of the only finding about a device."""
    (finding,) = (each for each in check_override(Look(Tree(), Wanted())) if each.found.startswith(f"{device}:"))
    return f"{finding.status.value}: {finding.found}"


def main() -> int:
    if not (CONFIGFS / "rdma_cm").is_dir():
        subprocess.run(["mount", "-t", "configfs", "none", CONFIGFS], check=True)
    device = CONFIGFS / "rdma_cm/rxe0"
    told = {"before": found("rxe0")}
    device.mkdir()
    try:
        (device / "ports/1/default_roce_tos").write_text(str(MODEL))
        told |= {"with": found("rxe0"), "other": found("rxe1")}
    finally:
        device.rmdir()
    print(json.dumps(told | {"after": found("rxe0")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
