"""Engines' memory as the book of registered memory sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvmoverd.ports.memory import Near
from kvmoverd.ports.transport import IoVec


class Region:
    """An engine's memory, as far as it is registered: nobody touches these addresses."""

    page_kind = "4 KiB"

    def __init__(self, address: int, size_bytes: int) -> None:
        self.address, self.size_bytes, self.closed = address, size_bytes, False
        self._before_close: list[Callable[[], None]] = []

    def on_close(self, before_close: Callable[[], None]) -> None:
        self._before_close.append(before_close)
        if self.closed:
            before_close()

    def close(self) -> None:
        self.closed = True
        for each in self._before_close:
            each()


class GpuRegion(Region):
    page_kind = "GPU 0"
    dmabuf_offset_bytes = 4096

    def __init__(self, address: int, size_bytes: int, dmabuf_fd: int, refusal: str = "") -> None:
        super().__init__(address, size_bytes)
        self.dmabuf_fd, self.dmabuf_refusal = dmabuf_fd, refusal


def iov(*rows: tuple[int, int]) -> IoVec:
    return np.array(rows, dtype=np.uint64).reshape(-1, 2)


def first_cnic(near: Near, users: Sequence[int]) -> tuple[int, str]:
    return 0, "the first one"
