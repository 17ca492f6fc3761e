"""User + sys of processes and threads, in nanoseconds' resolution where the kernel's tick would be too coarse."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from crc32c import crc32c

CPUCLOCK_SCHED = 2
CRC_BLOCKS = 64


def process_cpu_s(pid: int) -> float:
    """User + sys of all threads of a process, those that have ended among them. Raises `OSError` when it is gone.

    The clock's id is the one that clock_getcpuclockid(3) makes.
    """
    return time.clock_gettime((~pid << 3) | CPUCLOCK_SCHED)


class CpuMeter:
    """Reads the processes of one side at the beginning and at the end of a run."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._began_s = self._now_s()

    def spent_s(self) -> float:
        return self._now_s() - self._began_s

    def _now_s(self) -> float:
        return sum(process_cpu_s(pid) for pid in self._pids)


class Neighbours:
    """How busy all else on this machine was meanwhile: figures taken beside a busy neighbour are his figures, too."""

    def __init__(self, *pids: int) -> None:
        self._ours = CpuMeter(*pids)
        self._began_s = time.monotonic()
        self._busy_before_s = machine_cpu_s()

    def cores(self) -> float:
        """Cores that other processes, the kernel's own and the hypervisor had, on average."""
        took_s = time.monotonic() - self._began_s
        return max(0.0, machine_cpu_s() - self._busy_before_s - self._ours.spent_s()) / took_s


def machine_cpu_s() -> float:
    """Core-seconds since boot that were not idle, stolen ones among them."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def crc_s_per_gb(block_bytes: int) -> float:
    """What checking one GB of blocks costs a core that has nothing else to do, block by block as they come from a disk."""
    blocks = [os.urandom(block_bytes) for _ in range(CRC_BLOCKS)]
    return timed_s(lambda: [crc32c(block) for block in blocks]) / (CRC_BLOCKS * block_bytes / 1e9)


def timed_s(work: Callable[[], object]) -> float:
    """CPU time of this thread, the smallest of three tries."""
    found = []
    for _ in range(3):
        began_s = time.thread_time()
        work()
        found.append(time.thread_time() - began_s)
    return min(found)
