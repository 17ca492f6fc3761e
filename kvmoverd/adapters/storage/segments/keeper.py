"""The one background thread of a root: named jobs, each in its period, a bit at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

Job = Callable[[], bool | None]
"""Does a bit of work, a tenth of a second at most. True: there is more, go on as soon as the others had their turn."""

STUCK_S = 10.0
_NS = 10**9
_ERROR_CHARS_MAX = 300


@dataclass(slots=True)
class JobStats:
    """`longest_s`: of its runs; `error`: what the last failure said, empty after a run that went well."""

    runs: int = 0
    failures: int = 0
    longest_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Stuck:
    """A job that has been running for too long, most likely in the kernel."""

    job: str
    for_s: float


class _Periodic:
    def __init__(self, name: str, period_ns: int, job: Job, due_ns: int) -> None:
        self.name, self.period_ns, self.job, self.due_ns = name, period_ns, job, due_ns
        self.stats = JobStats()


class Keeper:
    """Runs its jobs one after the other, the one that is due longest first. All calls are for any thread.

    A job that fails is counted and comes again in its period; one that hangs holds up the others, and `stuck` says so. The
    thread is a daemon thread: one that is stuck in the kernel delays no exit.
    """

    def __init__(self, name: str, *, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self._jobs: dict[str, _Periodic] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._running: tuple[str, int] | None = None
        self._thread = threading.Thread(target=self._work, name=f"kvmover-keeper-{name}", daemon=True)

    def every(self, period_s: float, name: str, job: Job) -> None:
        """Adds a job: first as soon as possible, then `period_s` after each run's end."""
        with self._changed:
            assert name not in self._jobs, f"the keeper has a job {name!r} already"
            self._jobs[name] = _Periodic(name, round(period_s * _NS), job, self._now_ns())
            self._changed.notify()

    def start(self) -> None:
        self._thread.start()

    def wake(self, name: str) -> None:
        """The job is due now. Never blocks for longer than a look at the list."""
        with self._changed:
            self._jobs[name].due_ns = self._now_ns()
            self._changed.notify()

    def stats(self) -> dict[str, JobStats]:
        """What each job did so far; not to be changed."""
        with self._changed:
            return {name: job.stats for name, job in self._jobs.items()}

    def stuck(self, after_s: float = STUCK_S) -> Stuck | None:
        """The job that has been running for longer than `after_s`."""
        running = self._running
        if running is None:
            return None
        for_s = (self._now_ns() - running[1]) / _NS
        return Stuck(running[0], for_s) if for_s > after_s else None

    @property
    def closing(self) -> bool:
        """For jobs that are long: stop at the next chance."""
        return self._closing

    def close(self, timeout_s: float) -> bool:
        """Begins no more jobs; True when none is running any more. It may be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            self._run(job)

    def _next(self) -> _Periodic | None:
        """Waits for the next due job; None at the end."""
        with self._changed:
            while not self._closing:
                job = min(self._jobs.values(), key=lambda one: one.due_ns, default=None)
                wait_s = (job.due_ns - self._now_ns()) / _NS if job else None
                if job and wait_s is not None and wait_s <= 0:
                    # While it runs it is due in a period; `wake` may say otherwise meanwhile.
                    job.due_ns = self._now_ns() + job.period_ns
                    return job
                self._changed.wait(wait_s)
            return None

    def _run(self, job: _Periodic) -> None:
        began_ns, woken_ns = self._now_ns(), job.due_ns
        self._running = (job.name, began_ns)
        more = None
        try:
            more = job.job()
            job.stats.error = ""
        except Exception as error:  # noqa: BLE001 - one job's failure must not end the heartbeat
            job.stats.failures += 1
            job.stats.error = f"{type(error).__name__}: {error}"[:_ERROR_CHARS_MAX]
        self._running = None
        job.stats.runs += 1
        ended_ns = self._now_ns()
        job.stats.longest_s = max(job.stats.longest_s, (ended_ns - began_ns) / _NS)
        with self._changed:
            if more:
                job.due_ns = ended_ns
            elif job.due_ns == woken_ns:
                job.due_ns = ended_ns + job.period_ns
