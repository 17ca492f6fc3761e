"""A small profiler for a whole process: who has the CPU, thread by thread and function by function.

    python -m tests.bench.sampler OUT serve --config node.toml

runs the daemon's command line with a thread beside it that looks at all threads every few milliseconds and books the CPU
time that each has used since then under the innermost Python function it is in: a call of C (a checksum, a copy, a system
call) stands under the function that made it. On stdin "b" begins the books anew, "e" ends them; when the process has ended they
go to OUT as JSON.
"""

from __future__ import annotations

import json
import os
import re
import select
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from tests.bench.cpu import CPUCLOCK_SCHED

CPUCLOCK_PERTHREAD = 4
PERIOD_S = 0.004
TOP = 12
END_S = 5.0


class Sampler:
    """Books by kind of thread: a thread's name without the number at its end."""

    def __init__(self) -> None:
        self._spent_s: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._seen_s: dict[int, float] = {}
        self._commands: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="sampler", daemon=True)
        self.begin()

    def start(self, commands_fd: int | None = None) -> None:
        """`commands_fd`: "b" there does what `begin` does, "e" what `end` does."""
        self._commands = [commands_fd] if commands_fd is not None else []
        self._thread.start()

    def begin(self) -> None:
        """Begins the books anew."""
        self._spent_s.clear()
        self._began_s, self._ended_s = time.monotonic(), 0.0
        self._waited_before_s, self._waited_s = waited_s(), dict[str, float]()

    def end(self) -> None:
        """Ends the books; what comes later is not of interest."""
        if not self._ended_s:
            self._ended_s = time.monotonic()
            before = self._waited_before_s
            self._waited_s = {kind: total - before.get(kind, 0.0) for kind, total in waited_s().items()}

    def stop(self) -> dict[str, object]:
        """Ends the sampling; seconds of CPU by kind of thread and function, and of waiting for a core."""
        self._stop.set()
        self._thread.join(END_S)
        self.end()
        return {
            "wall_s": self._ended_s - self._began_s,
            "cpu_s": {kind: dict(_largest(spent)) for kind, spent in self._spent_s.items()},
            "total_cpu_s": {kind: sum(spent.values()) for kind, spent in self._spent_s.items()},
            "waited_for_core_s": self._waited_s,
        }

    def _work(self) -> None:
        while not self._stop.is_set():
            for fd in select.select(self._commands, [], [], PERIOD_S)[0]:
                self._obey(os.read(fd, 1))
            frames = sys._current_frames()
            for thread in threading.enumerate():
                if thread.ident in frames and thread.native_id is not None:
                    self._book(thread.name, thread.native_id, frames[thread.ident])

    def _obey(self, command: bytes) -> None:
        match command:
            case b"b":
                self.begin()
            case b"e":
                self.end()
            case b"":
                # The end of the pipe: nothing more will come, and it stays readable.
                self._commands = []

    def _book(self, name: str, native_id: int, frame: FrameType) -> None:
        """The clock's id is that of the thread, as the kernel makes it; an ended thread has none any more."""
        try:
            now_s = time.clock_gettime((~native_id << 3) | CPUCLOCK_PERTHREAD | CPUCLOCK_SCHED)
        except OSError:
            return
        spent_s = now_s - self._seen_s.get(native_id, now_s)
        self._seen_s[native_id] = now_s
        if spent_s and not self._ended_s:
            self._spent_s[kind_of(name)][_place(frame)] += spent_s


def waited_s() -> dict[str, float]:
    """Seconds that the threads of each kind could have run, but another had the core, since they began."""
    found: defaultdict[str, float] = defaultdict(float)
    for thread in threading.enumerate():
        with suppress(OSError):
            _, waited_ns, _ = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()
            found[kind_of(thread.name)] += int(waited_ns) / 1e9
    return found


def kind_of(name: str) -> str:
    """
    >>> kind_of("kvmover-disk-3"), kind_of("Thread-7 (_run)")
    ('kvmover-disk', 'Thread')
    """
    return re.sub(r"[-_ ]?\d+(_\d+)?( \(.*\))?$", "", name)


@contextmanager
def sampled(out: Path, commands_fd: int | None = None) -> Iterator[Sampler]:
    """Samples this process meanwhile; the books go to `out`."""
    sampler = Sampler()
    sampler.start(commands_fd)
    try:
        yield sampler
    finally:
        out.write_text(json.dumps(sampler.stop()))


def profile_text(path: Path) -> str:
    """Books as people read them."""
    books = json.loads(path.read_text())
    wall_s = books["wall_s"]
    lines = [f"{'thread':<24}{'CPU s':>8}{'of wall':>9}{'waited for a core, s':>22}"]
    for kind, total_s in sorted(books["total_cpu_s"].items(), key=lambda item: -item[1]):
        waited_s = books["waited_for_core_s"].get(kind, 0.0)
        lines.append(f"{kind:<24}{total_s:>8.3f}{total_s / wall_s:>9.1%}{waited_s:>22.3f}")
        for place, spent_s in sorted(books["cpu_s"][kind].items(), key=lambda item: -item[1]):
            if spent_s > total_s / 100:
                lines.append(f"    {spent_s:>8.3f} s  {place}")
    return "\n".join(lines)


def _largest(spent: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(spent.items(), key=lambda item: -item[1])[:TOP]


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_qualname} ({'/'.join(Path(code.co_filename).parts[-2:])}:{frame.f_lineno})"


def main() -> int:
    """The daemon's command line, sampled."""
    from kvmoverd.cli import main as daemon

    out, arguments = Path(sys.argv[1]), sys.argv[2:]
    with sampled(out, sys.stdin.fileno()):
        return daemon(arguments)


if __name__ == "__main__":
    sys.exit(main())
