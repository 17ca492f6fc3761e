"""Keeps copies beside the main root: opens what could not be opened before, and hears of purges by others."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from kvmoverd.adapters.storage.roots_absent import AbsentStorage
from kvmoverd.adapters.storage.roots_calls import Call
from kvmoverd.adapters.storage.roots_namespaces import Known, RootsNamespaces
from kvmoverd.adapters.storage.roots_root import Root
from kvmoverd.core.errors import KvmoverError
from kvmoverd.ports.storage import Storage

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often the main root is asked about open namespaces: so late a purge by others is heard of, where nobody tells."""
LOOK_STEP_S = 0.05
"""Of each such time; with very many namespaces the rest follows the next time."""
ANSWER_S = 0.5
"""How long one step waits for the main root; what it says later is taken at a later one."""
PAUSE_S, PAUSE_MAX_S = 1.0, 60.0
"""Between attempts with a copy that can't be opened, or can't open a namespace: twice as long each time."""


class _Copy:
    """One copy: what is being done to it, and when to try again after a failure."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self.call: Call[None] | None = None
        self.due_s = 0.0
        self.pause_s = PAUSE_S
        self.swept = False

    def failed(self, error: Exception, now_s: float) -> None:
        log.warning("storage %s is tried again in %.0f s: %s", self.root.name, self.pause_s, error)
        self.due_s = now_s + self.pause_s
        self.pause_s = min(2 * self.pause_s, PAUSE_MAX_S)

    def went_well(self) -> None:
        self.pause_s = PAUSE_S


class RootsKeeper:
    """`step` is for one thread, its own after `start`. `arrive` puts a storage that was opened in its root's place."""

    def __init__(
        self,
        spaces: RootsNamespaces,
        arrive: Callable[[Root, Storage], None],
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spaces, self._arrive, self._now_s = spaces, arrive, now_s
        self._copies = [_Copy(root) for root in spaces.copy_roots]
        self._look: Call[list[Known]] | None = None
        self._queue: deque[bytes] = deque()
        self._told: dict[bytes, str] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvmover-roots", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """No step is begun from now on. Calls that hang in a root stay in threads of their own."""
        self._closed.set()

    def step(self) -> None:
        known = self._heard()
        for copy in self._copies:
            if not self._closed.is_set():
                self._catch_up(copy, known)

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                self.step()
            except Exception:  # the thread must not end while the node lives
                log.exception("copies could not be looked after")

    def _heard(self) -> list[Known]:
        """What the main root says of open namespaces: of those that it was asked about, nothing while it hangs."""
        try:
            if self._look is None:
                self._look = self._spaces.main.calls.begin(self._ask, what="looking for purges")
            if self._look.wait(ANSWER_S):
                look, self._look = self._look, None
                return look.result(0.0)
        except KvmoverError as error:
            log.warning("the main root does not say what was purged: %s", error)
        return []

    def _ask(self) -> list[Known]:
        opened = self._spaces.main.opened
        if not self._queue:
            self._queue.extend(list(opened))
        found, until_s = list[Known](), self._now_s() + LOOK_STEP_S
        while self._queue and (not found or self._now_s() < until_s):
            fingerprint = self._queue.popleft()
            if tenure := opened.get(fingerprint):
                try:
                    found.append(self._spaces.look(tenure.namespace))
                except KvmoverError as error:
                    self._tell(fingerprint, str(error))
        return found

    def _tell(self, fingerprint: bytes, why: str) -> None:
        """Once: it may stay so for long, as with a model whose epoch is over."""
        if self._told.get(fingerprint) != why:
            log.warning("copies of a namespace are not used: %s", why)
            self._told[fingerprint] = why

    def _catch_up(self, copy: _Copy, known: list[Known]) -> None:
        now_s = self._now_s()
        if copy.call is not None and not self._ended(copy, copy.call, now_s):
            return
        if now_s < copy.due_s:
            return
        storage = copy.root.storage
        if isinstance(storage, AbsentStorage):
            self._open(copy, storage, now_s)
            return
        missing = [one for one in known if one.namespace.fingerprint not in copy.root.opened]
        if missing or not copy.swept:
            try:
                copy.call = copy.root.calls.begin(partial(self._follow, copy, missing), what="catching up")
            except KvmoverError as error:
                copy.failed(error, now_s)

    def _open(self, copy: _Copy, storage: AbsentStorage, now_s: float) -> None:
        found = storage.try_again()
        if isinstance(found, Exception):
            copy.failed(found, now_s)
        elif found is not None:
            copy.went_well()
            self._arrive(copy.root, found)

    def _ended(self, copy: _Copy, call: Call[None], now_s: float) -> bool:
        if not call.ended:
            return False
        copy.call = None
        try:
            call.result(0.0)
        except Exception as error:  # noqa: BLE001 whatever it is, it is tried again
            copy.failed(error, now_s)
        else:
            copy.went_well()
        return True

    def _follow(self, copy: _Copy, missing: list[Known]) -> None:
        for known in missing:
            self._spaces.follow(copy.root, known)
        if not copy.swept:
            self._spaces.sweep(copy.root)
            copy.swept = True
