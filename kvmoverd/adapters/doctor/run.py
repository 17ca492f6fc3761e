"""Runs checks: each in a process of its own, some beside each other, each with a deadline.

A driver may hold a reader in the kernel, and a library may end its process: neither may take the other findings along.
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


def findings_of(check: Check, look: Look) -> list[Finding]:
    """Of one check, in this process. Whatever goes wrong in it is a finding."""
    try:
        return list(check.run(look))
    except (UnreadableError, PermissionError) as error:
        return [Finding(Status.SKIP, str(error), "" if os.geteuid() == 0 else _AS_ROOT)]
    except Exception as error:  # noqa: BLE001 - a check that is wrong about this machine must not hide the others
        return [Finding(Status.FAIL, f"the check itself failed: {type(error).__name__}: {error}", "report this")]


def run_checks(checks: Sequence[Check], look: Look, *, at_once: int = 0) -> list[tuple[str, Finding]]:
    """What all of them found, each with the check's name, in their order.

    `at_once`: so many run beside each other, 0: as many as there are processors, and two at least. A check's time counts
    from its own start, so that a busy machine is not taken for one that hangs.
    """
    places = at_once or max(_AT_ONCE_MIN, os.cpu_count() or 1)
    children: list[_Child] = []
    waiting: dict[int, _Child] = {}
    try:
        while waiting or len(children) < len(checks):
            while len(waiting) < places and len(children) < len(checks):
                children.append(_begin(checks[len(children)], look))
                waiting[children[-1].fd] = children[-1]
            ready = _ready(waiting, min(child.until_s for child in waiting.values()))
            now_s = time.monotonic()
            for fd, child in list(waiting.items()):
                if fd in ready and not child.read():
                    waiting.pop(fd).end()
                elif fd not in ready and child.until_s <= now_s:
                    waiting.pop(fd).give_up()
    finally:
        for child in waiting.values():
            child.give_up()
    return [(child.check.name, finding) for child in children for finding in child.findings]


def _ready(fds: Iterable[int], until_s: float) -> set[int]:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(max(0.0, until_s - time.monotonic()) * 1000)}


@dataclass
class _Child:
    check: Check
    pid: int
    fd: int
    until_s: float
    answer: bytes = b""
    findings: Sequence[Finding] = ()

    def read(self) -> bool:
        """False when nothing more comes."""
        part = os.read(self.fd, _READ_BYTES)
        self.answer += part
        return bool(part) and len(self.answer) <= _ANSWER_BYTES_MAX

    def end(self) -> None:
        os.close(self.fd)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        try:
            self.findings = [
                Finding(Status(status), found, remedy) for status, found, remedy in json.loads(self.answer)
            ]
        except ValueError:
            how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
            self.findings = [Finding(Status.FAIL, f"the check's process was ended by {how}", "report this")]

    def give_up(self) -> None:
        """One that is stuck in the kernel is not waited for: it ends when the kernel lets it."""
        os.close(self.fd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        found = (
            f"no answer within {self.check.limit_s:g} s: something hangs in the kernel, or the machine is overloaded"
        )
        self.findings = [Finding(Status.FAIL, found, "see dmesg for the driver's own words, then try again")]


def _begin(check: Check, look: Look) -> _Child:
    read_fd, write_fd = os.pipe()
    until_s = time.monotonic() + check.limit_s + (look.watch_s if check.watches else 0.0)
    pid = os.fork()
    if pid == 0:
        _answer(check, look, write_fd)
    os.close(write_fd)
    return _Child(check, pid, read_fd, until_s)


def _answer(check: Check, look: Look, fd: int) -> None:
    """The child's whole life. It says nothing on the terminal, and holds it open for nobody."""
    try:
        os.setsid()  # so that what it starts can be ended with it
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nothing, standard)
        rows = [(finding.status.value, finding.found, finding.remedy) for finding in findings_of(check, look)]
        with os.fdopen(fd, "wb") as pipe:
            pipe.write(json.dumps(rows).encode())
    finally:
        os._exit(0)
