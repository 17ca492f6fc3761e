"""Descriptors that rings may read from: registered once, and taken out of the library before they are closed."""

from __future__ import annotations

import threading

from kvmoverd.adapters.storage.usrbio_library import Library


class _Registration:
    __slots__ = ("done", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.done = False


class RegisteredFds:
    """For any thread. Each registration is a request to the filesystem's daemon: nobody waits for another's."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._known: dict[int, _Registration] = {}

    def __len__(self) -> int:
        return len(self._known)

    def register(self, fd: int) -> None:
        """Does nothing when it is registered. Raises `OSError`; `forget` is due then, too."""
        registration = self._known.setdefault(fd, _Registration())
        with registration.lock:
            if not registration.done:
                self._library.register(fd)
                registration.done = True

    def forget(self, fd: int) -> None:
        """Before it is closed, when nothing reads from it any more. Does nothing when it is not registered."""
        registration = self._known.pop(fd, None)
        if registration is None:
            return
        with registration.lock:
            if registration.done:
                self._library.deregister(fd)

    def close(self) -> None:
        """Forgets all; they must still be open."""
        for fd in list(self._known):
            self.forget(fd)
