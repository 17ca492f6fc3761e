"""What tests of doctor's checks share: a look at a tree of files, and what it found."""

from __future__ import annotations

from collections.abc import Callable

from kvmoverd.adapters.doctor.finding import Finding, Findings, Look, Status, Wanted
from tests.unit.sysfs_kit import Machine

VERBS = Wanted(transport="verbs", local="verbs", pool_bytes=40 << 30)
UNLIMITED = "Max locked memory         unlimited            unlimited            bytes"
LITTLE = "Max locked memory         8388608              8388608              bytes"


def see(check: Callable[[Look], Findings], machine: Machine, wanted: Wanted | None = None) -> list[Finding]:
    found = list(check(Look(machine.tree, wanted or Wanted())))
    assert found, "a check says something"
    assert all(finding.remedy for finding in found if finding.status in (Status.WARN, Status.FAIL))
    return found


def one(check: Callable[[Look], Findings], machine: Machine, wanted: Wanted | None = None) -> Finding:
    (finding,) = see(check, machine, wanted)
    return finding


def statuses(found: list[Finding]) -> str:
    return " ".join(finding.status.value for finding in found)
