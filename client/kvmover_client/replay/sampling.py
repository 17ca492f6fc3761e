"""What each storage NIC read over time, and how evenly: the ratio of the busiest to the mean, window by window."""

from __future__ import annotations

import asyncio
import bisect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from kvmover_client.async_client import AsyncClient
from kvmover_client.errors import KvmoverError

SAMPLE_S = 0.25
WINDOW_S = 1.0
BUSY = 0.5
"""Windows count in which all NICs together read more than this part of the most that they could."""


@dataclass(slots=True)
class Samples:
    """Bytes that one node has read from storage, as a counter told it: times in seconds, ascending."""

    at_s: list[float] = field(default_factory=list)
    read_bytes: list[int] = field(default_factory=list)

    def add(self, at_s: float, read_bytes: int) -> None:
        self.at_s.append(at_s)
        self.read_bytes.append(read_bytes)

    @property
    def total_bytes(self) -> int:
        return self.read_bytes[-1] - self.read_bytes[0] if self.read_bytes else 0

    def value(self, at_s: float) -> float:
        """The counter at a time, on the line between the samples beside it.

        >>> Samples([0.0, 1.0], [0, 10]).value(0.25)
        2.5
        """
        index = bisect.bisect_right(self.at_s, at_s)
        if index == 0:
            return float(self.read_bytes[0])
        if index == len(self.at_s):
            return float(self.read_bytes[-1])
        before_s, after_s = self.at_s[index - 1], self.at_s[index]
        before, after = self.read_bytes[index - 1], self.read_bytes[index]
        return before + (after - before) * (at_s - before_s) / (after_s - before_s)


@dataclass(frozen=True, slots=True)
class Evenness:
    """Ratios of the node that read most to the mean of all; 1 is even, the number of nodes is one alone.

    `windows`: mean over those `busy_windows` of 1 s in which the NICs were more than half busy; 0: there was none.
    `whole`: of all bytes from begin to end.
    """

    windows: float
    busy_windows: int
    whole: float


def evenness(nodes: Sequence[Samples], rate_bytes_per_s: float) -> Evenness:
    """`rate_bytes_per_s`: what one NIC reads at most; 0: not known, then every window counts in which anything was read."""
    whole = _ratio([float(samples.total_bytes) for samples in nodes])
    begin_s = max((samples.at_s[0] for samples in nodes if samples.at_s), default=0.0)
    end_s = min((samples.at_s[-1] for samples in nodes if samples.at_s), default=0.0)
    least_bytes = BUSY * rate_bytes_per_s * len(nodes) * WINDOW_S
    ratios = []
    for number in range(int((end_s - begin_s) / WINDOW_S)):
        first_s = begin_s + number * WINDOW_S
        read = [samples.value(first_s + WINDOW_S) - samples.value(first_s) for samples in nodes]
        if sum(read) > least_bytes:
            ratios.append(_ratio(read))
    return Evenness(fmean(ratios) if ratios else 0.0, len(ratios), whole)


def _ratio(read: Sequence[float]) -> float:
    """0 when nothing was read."""
    return max(read) / fmean(read) if sum(read) else 0.0


async def sample(clients: Mapping[str, AsyncClient], into: Mapping[str, Samples]) -> None:
    """Asks all nodes every `SAMPLE_S` until it is cancelled. A node that does not answer is left out that time."""
    while True:
        begun_s = time.monotonic()
        await sample_once(clients, into)
        await asyncio.sleep(max(0.0, begun_s + SAMPLE_S - time.monotonic()))


async def sample_once(clients: Mapping[str, AsyncClient], into: Mapping[str, Samples]) -> None:
    """One look at all nodes."""
    await asyncio.gather(*(_sample(client, into[node]) for node, client in clients.items()))


async def _sample(client: AsyncClient, into: Samples) -> None:
    try:
        status = await client.node_status()
    except KvmoverError:
        return
    into.add(time.monotonic(), sum(root.read_bytes for root in status.storage))
