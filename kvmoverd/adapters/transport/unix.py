"""Unix sockets between daemons of one machine: frames carry addresses, the receiver pulls with process_vm_readv."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
from pathlib import Path

from kvmoverd.adapters.transport.frames import BodyKind
from kvmoverd.core.errors import ConfigError

PREFIX = "unix:"
BACKLOG = 128
PATH_BYTES_MAX = 107
_CREDENTIALS = struct.Struct("3i")
_CONNECT_S = 1.0


class UnixMedium:
    """Sockets for one path; the file belongs to its owner alone."""

    kind = BodyKind.ADDRESSES

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None

    @property
    def endpoint(self) -> str:
        return f"{PREFIX}{self._path}"

    def listen(self) -> socket.socket:
        """Raises `ConfigError` when the path is too long, in use, or can't be created."""
        if len(os.fsencode(self._path)) > PATH_BYTES_MAX:
            raise ConfigError(f"transport.socket {self._path} has more than {PATH_BYTES_MAX} bytes")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._remove_stale()
            sock.bind(str(self._path))
            # Nobody can connect before `listen`: the mode is never wider than this.
            self._path.chmod(0o600)
            status = self._path.stat()
            sock.listen(BACKLOG)
        except (OSError, ConfigError) as error:
            sock.close()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"transport.socket {self._path}: {error}") from error
        self._identity = (status.st_dev, status.st_ino)
        return sock

    def connect(self, endpoint: str) -> socket.socket:
        if not endpoint.startswith(PREFIX):
            raise ValueError(f"endpoint {endpoint!r} does not begin with {PREFIX}")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.connect(endpoint.removeprefix(PREFIX))
        except OSError:
            sock.close()
            raise
        return sock

    def accepted(self, sock: socket.socket) -> int:
        """The peer's process, as seen from here: 0 when it lives in a pid namespace that this one does not see."""
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, _, _ = _CREDENTIALS.unpack(raw)
        return int(pid)

    def release(self) -> None:
        """Removes the socket's file, unless another daemon has put its own there."""
        if self._identity is None:
            return
        with contextlib.suppress(OSError):
            status = self._path.stat()
            if (status.st_dev, status.st_ino) == self._identity:
                self._path.unlink()
        self._identity = None

    def _remove_stale(self) -> None:
        """A file that nobody listens behind is a dead daemon's. Raises `ConfigError` when somebody does."""
        try:
            status = self._path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(status.st_mode):
            raise ConfigError(f"transport.socket {self._path} exists and is no socket; name another path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
            trial.settimeout(_CONNECT_S)
            if trial.connect_ex(str(self._path)) != errno.ECONNREFUSED:
                raise ConfigError(f"transport.socket {self._path}: another process listens there")
        self._path.unlink()
