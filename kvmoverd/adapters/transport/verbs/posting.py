"""Chains of writes, with one doorbell: by the compiled helper where it was built, else by pyverbs, row after row.

Both do the same to the device. A chain's last row carries the caller's work id and completes; those before it carry
`MIDDLE` and complete only when they fail. `device` then keeps why, so that a chain has one completion whatever happens.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Protocol

from kvmoverd.adapters.transport.verbs.fabric import WRITE, FabricError, Writes
from kvmoverd.adapters.transport.verbs.library import Library, errno_of

try:
    from kvmoverd.adapters.transport.verbs import _post
except ImportError:
    COMPILED = False
else:
    COMPILED = True

MIDDLE = (1 << 64) - 1
"""No work id of a caller's."""


class Posts(Protocol):
    """What a queue pair may be told to do. All raise `FabricError`; then nothing or only a part is posted: destroy the pair."""

    def writes(self, writes: Writes, work_id: int, immediate: int | None) -> None: ...

    def message(self, address: int, size_bytes: int, key: int, work_id: int) -> None: ...

    def receive(self, address: int, size_bytes: int, key: int, work_id: int) -> None: ...

    def close(self) -> None:
        """When the queue pair is gone."""


class CompiledPosts:
    """By the helper. `pointer` is the address of the queue pair's `struct ibv_qp`: it answers for it."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def writes(self, writes: Writes, work_id: int, immediate: int | None) -> None:
        try:
            _post.writes(self._pointer, writes, 0, len(writes), work_id, -1 if immediate is None else immediate)
        except OSError as why:
            raise _refused("writes", why) from why

    def message(self, address: int, size_bytes: int, key: int, work_id: int) -> None:
        try:
            _post.message(self._pointer, address, size_bytes, key, work_id)
        except OSError as why:
            raise _refused("a message", why) from why

    def receive(self, address: int, size_bytes: int, key: int, work_id: int) -> None:
        try:
            _post.receive(self._pointer, address, size_bytes, key, work_id)
        except OSError as why:
            raise _refused("a receive slot", why) from why

    def close(self) -> None:
        self._pointer = 0


class Chain:
    """Work requests of pyverbs that are used again and again: it never frees the memory of one, and can't unlink two.

    They hang together from the newest to the oldest, which is the last of every chain: a chain of n begins at number n - 1.
    """

    def __init__(self, library: Library) -> None:
        self._wr = library.wr
        enums = library.enums
        self._signaled = enums.IBV_SEND_SIGNALED
        self._write = enums.IBV_WR_RDMA_WRITE
        self._write_immediate = enums.IBV_WR_RDMA_WRITE_WITH_IMM
        self._requests: list[Any] = []
        self._elements: list[Any] = []

    def build(self, writes: Writes, work_id: int, immediate: int | None) -> Any:
        """The first request of the chain; it is good until the next one is built."""
        count = len(writes)
        while len(self._requests) < count:
            self._grow()
        for number, (local, remote, size_bytes, local_key, remote_key, _) in enumerate(writes.tolist(), 1):
            element, request = self._elements[count - number], self._requests[count - number]
            element.addr = local
            element.length = size_bytes
            element.lkey = local_key
            request.wr_id = MIDDLE
            request.set_wr_rdma(remote_key, remote)
        last = self._requests[0]
        last.wr_id = work_id
        last.opcode = self._write if immediate is None else self._write_immediate
        last.imm_data = 0 if immediate is None else socket.htonl(immediate)
        return self._requests[count - 1]

    def close(self) -> None:
        for element in self._elements:
            element.close()
        self._elements.clear()
        self._requests.clear()

    def _grow(self) -> None:
        element = self._wr.SGE(0, 0, 0)
        flags = 0 if self._requests else self._signaled
        request = self._wr.SendWR(opcode=self._write, num_sge=1, sg=[element], send_flags=flags)
        # The copy of the element that it made is given back for the element itself, which has setters.
        request.close()
        request.sg_list = element
        if self._requests:
            request.next_wr = self._requests[-1]
        self._elements.append(element)
        self._requests.append(request)


class PyverbsPosts:
    """By pyverbs: a few calls of the interpreter for each row."""

    def __init__(self, library: Library, pair: Any) -> None:
        self._library = library
        self._pair = pair
        self._chain = Chain(library)

    def writes(self, writes: Writes, work_id: int, immediate: int | None) -> None:
        check(writes, work_id, immediate)
        self._send(self._chain.build(writes, work_id, immediate), "writes")

    def message(self, address: int, size_bytes: int, key: int, work_id: int) -> None:
        wr, enums = self._library.wr, self._library.enums
        element = wr.SGE(address, size_bytes, key)
        request = wr.SendWR(
            wr_id=work_id, opcode=enums.IBV_WR_SEND, num_sge=1, sg=[element], send_flags=enums.IBV_SEND_SIGNALED
        )
        try:
            self._send(request, "a message")
        finally:
            request.close()
            element.close()

    def receive(self, address: int, size_bytes: int, key: int, work_id: int) -> None:
        wr = self._library.wr
        element = wr.SGE(address, size_bytes, key)
        request = wr.RecvWR(wr_id=work_id, num_sge=1, sg=[element])
        try:
            self._pair.post_recv(request)
        except self._library.error as why:
            raise _refused("a receive slot", why, errno_of(why)) from why
        finally:
            request.close()
            element.close()

    def close(self) -> None:
        self._chain.close()
        self._pair = None

    def _send(self, request: Any, what: str) -> None:
        try:
            self._pair.post_send(request)
        except self._library.error as why:
            raise _refused(what, why, errno_of(why)) from why


def check(writes: Writes, work_id: int, immediate: int | None) -> None:
    """Raises `ValueError` for what the helper refuses too."""
    if writes.dtype != WRITE or not len(writes) or not writes.flags.c_contiguous:
        raise ValueError(f"a chain of {len(writes)} rows of {writes.dtype} is none")
    if not 0 <= work_id < MIDDLE or (immediate is not None and not 0 <= immediate < 1 << 32):
        raise ValueError(f"work id {work_id} or immediate {immediate} is none")


def _refused(what: str, why: Exception, code: int = 0) -> FabricError:
    words = os.strerror(code) if code else getattr(why, "strerror", None) or str(why)
    return FabricError(f"posting {what} was refused: {words}")
