"""Rows of a chain: both ends' slices at common cuts, each row one RDMA write. Arrays only: there is no object per slice."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.memory.iovec import merged_ends
from kvmoverd.adapters.transport.verbs.book import Keys
from kvmoverd.adapters.transport.verbs.fabric import WRITE, Writes
from kvmoverd.adapters.transport.verbs.messages import PLACE, Places
from kvmoverd.ports.transport import IoVec

WRITE_BYTES_MAX = 4 << 20
"""One row at most: what every device takes in one message, and still small against what is on its way."""
PLACE_BYTES_MAX = 1 << 30
"""One granted place at most: its size goes over the wire in 32 bits."""

PART_ROWS_MIN = 256
PART_BYTES_MIN = 8 << 20
"""A frame goes in parts only where it must, and then in parts that are worth a doorbell."""

_Numbers = npt.NDArray[np.int64]


class Chain:
    """The writes of one frame, taken from the front as room comes free."""

    def __init__(self, rows: Writes) -> None:
        self._rows = rows
        self._ends: _Numbers = rows["size_bytes"].astype(np.int64).cumsum()
        self._taken = 0

    @property
    def left(self) -> int:
        """Rows that were not taken."""
        return len(self._rows) - self._taken

    def fitting(self, rows_free: int, bytes_free: int) -> int:
        """How many rows may go now; 0 where that would be so few that it is better to wait for more room."""
        if not self.left or rows_free < min(self.left, PART_ROWS_MIN):
            return 0
        begin_bytes = self._begin_bytes
        if bytes_free < min(int(self._ends[-1]) - begin_bytes, PART_BYTES_MIN):
            return 0
        most = int(self._ends.searchsorted(begin_bytes + bytes_free, side="right")) - self._taken
        return min(most, rows_free, self.left)

    def take(self, rows: int) -> tuple[Writes, int]:
        """The next rows, and their bytes."""
        begin_bytes = self._begin_bytes
        part = self._rows[self._taken : self._taken + rows]
        self._taken += rows
        return part, self._begin_bytes - begin_bytes

    def stop(self) -> None:
        """The rest is never taken."""
        self._taken = len(self._rows)

    @property
    def _begin_bytes(self) -> int:
        return int(self._ends[self._taken - 1]) if self._taken else 0


def places_of(slices: IoVec, keys: Keys) -> Places:
    """Slices and their remote keys as they are granted: neighbours that touch are one, long ones are cut."""
    sizes = slices[:, 1].astype(np.int64)
    starts, ends = _runs(sizes, [(slices[:, 0], keys[:, 1])], PLACE_BYTES_MAX)
    which, within = _from(sizes, starts)
    rows = np.empty(len(starts), PLACE)
    rows["address"] = slices[which, 0] + within.astype(np.uint64)
    rows["size_bytes"] = ends - starts
    rows["key"] = keys[which, 1]
    return rows


def writes_between(source: IoVec, source_keys: Keys, places: Places) -> Writes:
    """A row for each piece that lies in one slice at both ends; pieces that touch at both ends are one. Equal totals."""
    local_sizes, remote_sizes = source[:, 1].astype(np.int64), places["size_bytes"].astype(np.int64)
    if np.array_equal(local_sizes, remote_sizes):
        sizes, addresses, remotes = local_sizes, source[:, 0], places["address"]
        local_keys, remote_keys = source_keys[:, 0], places["key"]
    else:
        cuts = merged_ends(local_sizes.cumsum(), remote_sizes.cumsum())
        sizes = np.diff(cuts, prepend=0)
        begins = cuts - sizes
        (local, local_in), (remote, remote_in) = _from(local_sizes, begins), _from(remote_sizes, begins)
        addresses = source[local, 0] + local_in.astype(np.uint64)
        remotes = places["address"][remote] + remote_in.astype(np.uint64)
        local_keys, remote_keys = source_keys[local, 0], places["key"][remote]
    starts, ends = _runs(sizes, [(addresses, local_keys), (remotes, remote_keys)], WRITE_BYTES_MAX)
    which, within = _from(sizes, starts)
    rows = np.zeros(len(starts), WRITE)
    rows["local"] = addresses[which] + within.astype(np.uint64)
    rows["remote"] = remotes[which] + within.astype(np.uint64)
    rows["size_bytes"] = ends - starts
    rows["local_key"] = local_keys[which]
    rows["remote_key"] = remote_keys[which]
    return rows


def _from(sizes: _Numbers, begins: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Which slice each byte position lies in, and how far in it."""
    ends = sizes.cumsum()
    which = ends.searchsorted(begins, side="right").astype(np.int64)
    return which, (begins + sizes[which] - ends[which]).astype(np.int64)


def _runs(
    sizes: _Numbers, sides: list[tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]], bytes_max: int
) -> tuple[_Numbers, _Numbers]:
    """Begins and ends of what is one row: slices that touch on all sides under one key, cut where they are too long."""
    ends = sizes.cumsum()
    if not len(sizes) or not ends[-1]:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    touch = np.ones(len(sizes) - 1, bool)
    for addresses, keys in sides:
        touch &= (addresses[:-1] + sizes[:-1].astype(np.uint64) == addresses[1:]) & (keys[:-1] == keys[1:])
    run_ends = ends[np.append(~touch, True)]
    run_ends = run_ends[np.diff(run_ends, prepend=0) > 0]
    run_begins = np.concatenate([np.zeros(1, np.int64), run_ends[:-1]])
    counts = -(-(run_ends - run_begins) // bytes_max)
    number = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    starts: _Numbers = np.repeat(run_begins, counts) + number * bytes_max
    return starts, np.minimum(starts + bytes_max, np.repeat(run_ends, counts))
