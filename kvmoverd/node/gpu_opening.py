"""Engines' GPU memory: opened beside the loop, given back before its owner is told so, refused where nothing reaches it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvmoverd.core.errors import BadPlan, NoCuda, StorageUnusable
from kvmoverd.node.services import OffLoop
from kvmoverd.node.sessions import Region
from kvmoverd.ports.memory import GpuRegion, GpuShare, LentMemory, Memory

OPEN_S = 30.0
"""The first time CUDA makes a context, which takes a second or some."""
LOOK_S = 0.002

OpenGpu = Callable[[GpuShare], Memory]


class _Opening:
    """What was opened has one owner: who takes it, or, once nobody waits any more, whichever thread comes last."""

    def __init__(self, open_gpu: OpenGpu, share: GpuShare) -> None:
        self._open_gpu = open_gpu
        self._share = share
        self._made: list[Memory] = []
        self._abandoned = False

    def work(self) -> None:
        self._made.append(self._open_gpu(self._share))
        if self._abandoned:
            self._drop()

    def take(self) -> Memory:
        return self._made.pop()

    def abandon(self) -> None:
        self._abandoned = True
        self._drop()

    def _drop(self) -> None:
        try:
            self._made.pop().close()
        except IndexError:
            return


async def open_beside(off_loop: OffLoop, open_gpu: OpenGpu, share: GpuShare) -> Memory:
    """Nothing stays open when the caller does not wait for it. Raises `NoCuda`, also after `OPEN_S`, and `BadRegion`."""
    opening = _Opening(open_gpu, share)
    try:
        await off_loop(opening.work, what="opening GPU memory", timeout_s=OPEN_S)
        return opening.take()
    except StorageUnusable as error:
        opening.abandon()
        raise NoCuda(f"CUDA does not answer: {error}") from error
    except BaseException:
        opening.abandon()
        raise


async def given_back(memory: Memory, timeout_s: float) -> bool:
    """After `close`: may its owner free it? False when that is not so within `timeout_s`."""
    if not isinstance(memory, LentMemory):
        return True
    loop = asyncio.get_running_loop()
    until_s = loop.time() + timeout_s
    while not memory.given_back:  # a thread of the driver's says so, there is nothing to wait on
        if loop.time() > until_s:
            return False
        await asyncio.sleep(LOOK_S)
    return True


def is_on_gpu(region: Region) -> bool:
    return isinstance(region.memory, GpuRegion)


def check_on_host(region: Region, node: str) -> None:
    """Where the transport between nodes moves host memory only. Raises `BadPlan`, before a send could break the channel."""
    if isinstance(region.memory, GpuRegion):
        raise BadPlan(
            f"region {region.region_id} is memory of {region.memory.page_kind}, and only transport.kind = verbs "
            f"moves that to and from {node}; use it, or a region of host memory"
        )
