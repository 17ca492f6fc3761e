"""The threads of one transport: named, counted, joined within a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

NO_THREAD = "the system starts no more threads; raise its limit (ulimit -u, TasksMax)"


class Threads:
    """Threads are daemonic: one that is stuck in the kernel does not keep the process from ending."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, name: str, run: Callable[[], None]) -> bool:
        """False when the system starts no more threads."""
        thread = threading.Thread(target=run, name=f"{self._prefix}:{name}", daemon=True)
        with self._lock:
            self._threads = [known for known in self._threads if known.is_alive()]
            try:
                thread.start()
            except RuntimeError:
                return False
            self._threads.append(thread)
            return True

    def join(self, timeout_s: float) -> bool:
        """True when all have ended."""
        deadline_s = time.monotonic() + timeout_s
        while alive := self._alive():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            alive[0].join(left_s)
        return True

    def _alive(self) -> list[threading.Thread]:
        """Asked anew after each join: a thread that ends may have started another before."""
        with self._lock:
            return [thread for thread in self._threads if thread.is_alive()]
