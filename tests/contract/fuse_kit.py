"""A filesystem that fails as it is told: `fuse_mount(place, backing)` serves `backing` at `place` through FUSE.

    with fuse_mount(tmp_path / "place", tmp_path / "backing") as fuse:
        fuse.shorten("READ", "*.blk", 5000)      # reads of blocks give 5,000 bytes
        fuse.fail("OPEN", number=errno.ESTALE, times=1)
        fuse.hang("WRITE")                       # never answered, until fuse.resume()

Two mounts of one backing directory are two nodes: each has caches of its own, `AS_3FS` for as long as 3FS has them. With
`volatile=True` nothing is on the disk before it is synced, and `power_cut` loses the rest. The server is a process of its
own and ends with the test, whatever becomes of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from fuse_server import MNT_DETACH, MNT_FORCE
from fuse_wire import Caching
from markers import skip_no_fuse

__all__ = ["AS_3FS", "NO_CACHE", "Caching", "FuseMount", "fuse_mount"]

WAIT_S = 10.0
NO_CACHE = Caching()
AS_3FS = Caching(attr_s=30.0, entry_s=30.0, negative_s=5.0)
"""What the kernel of a 3FS client believes without asking."""
_SERVER = Path(__file__).with_name("fuse_server.py")


class FuseMount:
    """One mount and its server; paths of rules are relative to the mount, with `fnmatch` wildcards."""

    def __init__(self, place: Path, backing: Path, settings: dict[str, Any]) -> None:
        self.place = place
        self.backing = backing
        self._settings = settings
        self._start()

    def fail(self, op: str = "*", path: str = "*", number: int = errno.EIO, *, after: int = 0, times: int = 0) -> int:
        """These requests get the error. `op` is a name of `fuse_wire.Op`; gives the rule's number."""
        return self._add("error", op, path, number, after, times)

    def shorten(
        self, op: str = "READ", path: str = "*", bytes_max: int = 4096, *, after: int = 0, times: int = 0
    ) -> int:
        """Each of these READs or WRITEs moves no more than so much. The kernel asks for 1 MiB at most at a time."""
        return self._add("short", op, path, bytes_max, after, times)

    def delay(self, op: str = "*", path: str = "*", delay_s: float = 0.1, *, after: int = 0, times: int = 0) -> int:
        """These are served later; others pass them by."""
        return self._add("delay", op, path, round(delay_s * 1000), after, times)

    def hang(self, op: str = "*", path: str = "*", *, after: int = 0, times: int = 0) -> int:
        """These are not answered. Who asks can't be killed until `resume` or the end."""
        return self._add("hang", op, path, 0, after, times)

    def clear(self, rule: int | None = None) -> None:
        """Ends a rule, or all; what is held stays so."""
        self._ask(command="clear", rule=rule)

    def resume(self) -> int:
        """Nothing hangs any more; how many requests were held and are served now."""
        return int(self._ask(command="resume"))

    @property
    def held(self) -> int:
        """Requests without an answer."""
        return int(self._ask(command="state")["held"])

    @property
    def counts(self) -> dict[str, int]:
        """Requests so far by name, those with faults too."""
        return dict(self._ask(command="state")["counts"])

    @property
    def unsynced_pages(self) -> int:
        """Pages that a power cut would lose, with `volatile`."""
        return int(self._ask(command="state")["unsynced"])

    def power_cut(self, *, keep: float = 0.0, seed: int = 0) -> int:
        """Unsynced pages are lost but for a share of `keep`, drawn by `seed`; then it is mounted anew. Gives pages lost.

        Files that were open, in any process, are so no longer.
        """
        lost = int(self._ask(command="cut", keep=keep, seed=seed))
        self.end()
        self._start()
        return lost

    def kill(self) -> None:
        """The server dies: all that waits, and all later, gets ENOTCONN."""
        self._child.kill()
        self._child.wait(WAIT_S)

    def end(self) -> None:
        """Ends server and mount; safe to call again."""
        self._control.close()
        if self._child.poll() is None:
            self.kill()
        ctypes.CDLL(None).umount2(os.fsencode(self.place), MNT_FORCE | MNT_DETACH)

    def _start(self) -> None:
        self._control, its_end = socket.socketpair()
        self._control.settimeout(WAIT_S)
        self._lines = b""
        with its_end:
            arguments = (str(self.place), str(self.backing), str(its_end.fileno()), json.dumps(self._settings))
            self._child = subprocess.Popen(
                [sys.executable, _SERVER, *arguments], pass_fds=(its_end.fileno(),), stdin=subprocess.DEVNULL
            )
        started = self._heard()
        if "refused" in started:
            self.end()
            pytest.skip(skip_no_fuse(started["refused"]))

    def _add(self, do: str, op: str, path: str, number: int, after: int, times: int) -> int:
        rule = {"do": do, "op": op, "path": path, "number": number, "after": after, "times": times}
        return int(self._ask(command="add", **rule))

    def _ask(self, **words: object) -> Any:
        self._control.sendall(json.dumps(words).encode() + b"\n")
        return self._heard()

    def _heard(self) -> Any:
        while b"\n" not in self._lines:
            heard = self._control.recv(1 << 16)
            assert heard, f"the FUSE server has ended with status {self._child.wait(WAIT_S)}"
            self._lines += heard
        line, _, self._lines = self._lines.partition(b"\n")
        return json.loads(line)


@contextlib.contextmanager
def fuse_mount(
    place: Path,
    backing: Path,
    *,
    caching: Caching = NO_CACHE,
    volatile: bool = False,
    locks: bool = True,
    kind: str = "fuse.kvmover",
    life_s: float = 120.0,
) -> Iterator[FuseMount]:
    """Makes both directories as needed. `locks` false: flock and fcntl locks get ENOSYS; `kind`: the type in /proc/mounts.

    Skips the test where FUSE can't be mounted. After `life_s` the server ends by itself, and what hangs in it fails.
    """
    place.mkdir(parents=True, exist_ok=True)
    backing.mkdir(parents=True, exist_ok=True)
    settings = {"caching": asdict(caching), "volatile": volatile, "locks": locks, "kind": kind, "life_s": life_s}
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip(skip_no_fuse("/dev/fuse can't be opened"))
    mount = FuseMount(place, backing, settings)
    try:
        yield mount
    finally:
        mount.end()


def mounts_below(directory: Path) -> list[str]:
    """What is mounted below a directory."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [line.split()[1] for line in lines if line.split()[1].startswith(str(directory))]
