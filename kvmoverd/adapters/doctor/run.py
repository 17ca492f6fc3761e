"""Runs checks in processes of their own, beside each other, each check with a deadline.

A driver may hold a reader in the kernel, and a library may end its process: neither may take the other findings along. A
process goes through its share of the checks; if one hangs or kills it, the next process goes on behind that one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvmoverd.adapters.doctor.finding import Check, Finding, Look, Status
from kvmoverd.adapters.sysfs.tree import UnreadableError

_READ_BYTES = 1 << 16
_ANSWER_BYTES_MAX = 1 << 20
_AT_ONCE_MIN = 2
_AS_ROOT = "run doctor as root to see it"
_REPORT = "report this"


def findings_of(check: Check, look: Look) -> list[Finding]:
    """Of one check, in this process. Whatever goes wrong in it is a finding."""
    found: list[Finding] = []
    try:
        found.extend(check.run(look))
    except (UnreadableError, PermissionError) as error:
        found.append(Finding(Status.SKIP, str(error), "" if os.geteuid() == 0 else _AS_ROOT))
    except Exception as error:  # noqa: BLE001 - a check that is wrong about this machine must not hide the others
        found.append(Finding(Status.FAIL, f"the check itself failed: {type(error).__name__}: {error}", _REPORT))
    return found


def run_checks(checks: Sequence[Check], look: Look, *, at_once: int = 0) -> list[tuple[str, Finding]]:
    """What all of them found, each with the check's name, in their order.

    `at_once`: so many processes, 0: as many as there are processors, and two at least.
    """
    places = at_once or max(_AT_ONCE_MIN, os.cpu_count() or 1)
    found: dict[str, Sequence[Finding]] = {}
    shares = [list(checks[place::places]) for place in range(places)]
    workers = {worker.fd: worker for worker in (_begin(share, look) for share in shares if share)}
    try:
        while workers:
            ready = _ready(workers, min(worker.until_s for worker in workers.values()))
            for worker in list(workers.values()):
                trouble = worker.go_on(found, is_ready=worker.fd in ready)
                if trouble is None:
                    continue
                del workers[worker.fd]
                if worker.checks:
                    found[worker.checks.pop(0).name] = [trouble]
                if worker.checks:
                    follower = _begin(worker.checks, look)
                    workers[follower.fd] = follower
    finally:
        for worker in workers.values():
            worker.kill()
    return [(check.name, finding) for check in checks for finding in found[check.name]]


def _ready(fds: Iterable[int], until_s: float) -> set[int]:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(max(0.0, until_s - time.monotonic()) * 1000)}


@dataclass
class _Worker:
    """A process and what it has still to do; its first check is the one under way."""

    checks: list[Check]
    look: Look
    pid: int
    fd: int
    until_s: float
    answer: bytes = b""

    def go_on(self, found: dict[str, Sequence[Finding]], *, is_ready: bool) -> Finding | None:
        """Takes what has been said. When it has ended, or was ended for being late: what is wrong with the check under way."""
        if not is_ready:
            return None if time.monotonic() < self.until_s else self.kill()
        part = os.read(self.fd, _READ_BYTES)
        if not part:
            return self._ended()
        *lines, self.answer = (self.answer + part).split(b"\n")
        for line in lines:
            found[self.checks.pop(0).name] = [
                Finding(Status(status), text, remedy) for status, text, remedy in json.loads(line)
            ]
            self.until_s = _until_s(self.checks, self.look)
        return self.kill() if len(self.answer) > _ANSWER_BYTES_MAX else None

    def _ended(self) -> Finding:
        os.close(self.fd)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
        return Finding(Status.FAIL, f"the check's process was ended by {how}", _REPORT)

    def kill(self) -> Finding:
        """One that is stuck in the kernel is not waited for: it ends when the kernel lets it."""
        os.close(self.fd)
        for end in (os.killpg, os.kill):  # it may not have come to make its group yet
            with contextlib.suppress(ProcessLookupError):
                end(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        limit_s = self.checks[0].limit_s if self.checks else 0.0
        text = f"no answer within {limit_s:g} s: something hangs in the kernel, or the machine is overloaded"
        return Finding(Status.FAIL, text, "see dmesg for the driver's own words, then try again")


def _until_s(checks: Sequence[Check], look: Look) -> float:
    """For the first of them; the end of the process, when none is left, comes at once."""
    if not checks:
        return time.monotonic() + 1.0
    return time.monotonic() + checks[0].limit_s + (look.watch_s if checks[0].watches else 0.0)


def _begin(checks: list[Check], look: Look) -> _Worker:
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        _answer(checks, look, write_fd)
    os.close(write_fd)
    return _Worker(checks, look, pid, read_fd, _until_s(checks, look))


def _answer(checks: Sequence[Check], look: Look, fd: int) -> None:
    """The child's whole life. It says nothing on the terminal, and holds it open for nobody."""
    try:
        os.setsid()  # so that what it starts can be ended with it
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nothing, standard)
        with os.fdopen(fd, "wb", buffering=0) as pipe:
            for check in checks:
                rows = [(finding.status.value, finding.found, finding.remedy) for finding in findings_of(check, look)]
                pipe.write(json.dumps(rows).encode() + b"\n")
    finally:
        os._exit(0)
