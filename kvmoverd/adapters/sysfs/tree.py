"""Files of a machine below one root directory. What is not there is None or empty; what may not be read says so."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

_BYTES_MAX = 1 << 20
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ENODEV, errno.ENXIO, errno.EOPNOTSUPP, errno.ESRCH}
"""Drivers answer so where a value does not exist: the speed of a link that is down, an empty place of a GID table."""


class UnreadableError(Exception):
    """A file is there, but not for this user: which one, and what the system said."""


@dataclass(frozen=True, slots=True)
class Tree:
    """`root`: "/" for this machine. A name with a NUL in it, as what is no text has, is not there."""

    root: Path = Path("/")

    def at(self, path: str) -> Path:
        """Where an absolute path of the machine lies."""
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str | None:
        """Without blanks around; None where there is no such file. Raises `UnreadableError`."""
        found = self.content(path)
        return None if found is None else found.decode(errors="replace").strip()

    def content(self, path: str) -> bytes | None:
        """A megabyte at most; None where there is no such file. Raises `UnreadableError`."""
        try:
            with open(self.at(path), "rb", buffering=0, opener=_without_waiting) as file:
                return file.read(_BYTES_MAX) or b""
        except ValueError:
            return None
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise UnreadableError(f"{path} can't be read: {error.strerror}") from error

    def number(self, path: str) -> int | None:
        """In any base that Python knows by its prefix; None for no file or no number. Raises `UnreadableError`."""
        try:
            return int(self.text(path) or "", 0)
        except ValueError:
            return None

    def names(self, path: str) -> list[str]:
        """Of a directory, numbers in their order; empty where there is none. Raises `UnreadableError`."""
        try:
            found = os.listdir(self.at(path))
        except ValueError:
            return []
        except OSError as error:
            if error.errno in _ABSENT:
                return []
            raise UnreadableError(f"{path} can't be listed: {error.strerror}") from error
        return sorted(found, key=lambda name: (0, int(name), "") if name.isdecimal() else (1, 0, name))

    def exists(self, path: str) -> bool:
        return os.path.exists(self.at(path))

    def real(self, path: str) -> str | None:
        """Absolute path on the machine with all links followed; None where it leads nowhere."""
        if not self.exists(path):
            return None
        found, root = Path(os.path.realpath(self.at(path))), Path(os.path.realpath(self.root))
        return "/" + str(found.relative_to(root)) if found.is_relative_to(root) else str(found)

    def lines(self, path: str) -> list[str]:
        """Raises `UnreadableError`."""
        return (self.text(path) or "").splitlines()


def _without_waiting(path: str, flags: int) -> int:
    """A pipe that nobody writes to is empty, and not waited for."""
    return os.open(path, flags | os.O_NONBLOCK)
